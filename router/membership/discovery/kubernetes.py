"""Replicas behind a service of Kubernetes: its EndpointSlices are listed once, then watched."""

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from router.config import DiscoveredConfig, KubernetesConfig, join_host_port
from router.membership.discovery.found import Name
from router.membership.discovery.slices import SliceList, Slices, WatchEvent
from router.membership.members import Source
from warmroute_common.config_reader import describe

log = logging.getLogger("warmroute.membership")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_WATCH_S: Final = 240
"""After which the API is to end a watch, which then goes on with another."""
_SLACK_S: Final = 15.0
"""A watch that is so late in ending has lost its connection."""
_ANSWER_S: Final = 20.0
_GONE: Final = 410
_LINE_BYTES: Final = 8 << 20
"""Of one event at most: a slice has at most 1000 endpoints."""
_NAMESPACE_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

_LIST: Final = msgspec.json.Decoder(SliceList)
_EVENT: Final = msgspec.json.Decoder(WatchEvent)


class _GoneError(Exception):
    """What changed since is not known there any more: all is to be listed anew."""


class KubernetesWatch:
    """Follows the slices of a service."""

    def __init__(
        self,
        config: KubernetesConfig,
        each: DiscoveredConfig,
        name: Name,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._config = config
        self._name = name
        self._slices = Slices(config, each)
        self._first_pause_s = first_pause_s
        self._failures = 0

    def __str__(self) -> str:
        return "Kubernetes"

    async def run(self) -> None:
        """Name the service's replicas, without end.

        Those that are known stay while the API cannot be reached.
        """
        while True:
            try:
                await self._follow()
            except _GoneError:
                log.info("what changed at Kubernetes is not known any more: listing anew")
                self._failures += 1
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if not self._failures:
                    log.warning("Kubernetes does not tell of replicas: %s", describe(error))
                self._failures += 1
            except Exception:  # else no replica would join or leave any more
                log.exception("following the replicas of Kubernetes failed")
                self._failures += 1
            pause_s = self._first_pause_s * 2 ** min(self._failures, 10)
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    async def _follow(self) -> None:
        """List, then watch as long as that goes well; raise `_GoneError`, or what went wrong."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=await asyncio.to_thread(self._trusted)),
            read_bufsize=_LINE_BYTES,
        ) as session:
            version = await self._list(session)
            while True:
                version = await self._watch(session, version)
                self._failures = 0
                await asyncio.sleep(self._first_pause_s)  # one that ends at once would busy both

    async def _list(self, session: aiohttp.ClientSession) -> str:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with await self._get(session, {}, timeout) as response:
            told = _LIST.decode(await response.read())
        self._slices.replace(told.items)
        self._tell()
        return told.metadata.resource_version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Take over every change after a version until the watch ends; return the last version."""
        asked = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_ANSWER_S, sock_read=_WATCH_S + _SLACK_S
        )
        async with await self._get(session, asked, timeout) as response:
            async for line in response.content:
                event = _EVENT.decode(line)
                if event.type == "ERROR":
                    raise _error(event)
                self._failures = 0
                told = event.object.get("metadata", {}).get("resourceVersion")
                version = str(told or version)
                if event.type != "BOOKMARK":
                    self._slices.apply(event)
                    self._tell()
        return version

    def _tell(self) -> None:
        self._name(Source.KUBERNETES, self._slices.replicas())

    # --- the API

    async def _get(
        self, session: aiohttp.ClientSession, asked: dict[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Ask for the slices; raise `_GoneError`, or ValueError for any other refusal."""
        config = self._config
        selector = config.selector or f"kubernetes.io/service-name={config.service}"
        token, namespace = await asyncio.to_thread(self._credentials)
        url = f"{_api_url(config)}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        response = await session.get(
            url,
            params={"labelSelector": selector, **asked},
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=limits,
        )
        if response.status == _GONE:
            response.close()
            raise _GoneError
        if response.status != 200:
            said = (await response.text())[:300]
            response.close()
            raise ValueError(f"{url} answers {response.status}: {said}")
        return response

    def _credentials(self) -> tuple[str | None, str]:
        """Return the token and the namespace, read anew: a pod's token is exchanged every hour."""
        token = _content(self._config.token_file)
        return token, self._config.namespace or _content(_NAMESPACE_FILE) or "default"

    def _trusted(self) -> ssl.SSLContext | bool:
        path = Path(self._config.ca_file)
        return ssl.create_default_context(cafile=str(path)) if path.exists() else True


def _content(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _api_url(config: KubernetesConfig) -> str:
    if config.api_url is not None:
        return config.api_url.rstrip("/")
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise ValueError(
            "this is no pod (KUBERNETES_SERVICE_HOST is not set): set discovery.kubernetes.api_url"
        )
    return f"https://{join_host_port(host, int(os.environ.get('KUBERNETES_SERVICE_PORT', '443')))}"


def _error(event: WatchEvent) -> Exception:
    if event.object.get("code") == _GONE:
        return _GoneError()
    return ValueError(f"the watch ended: {event.object.get('message', event.object)}")
