"""Replicas behind a Kubernetes service: its EndpointSlices are listed once, then watched."""

import asyncio
import logging
import os
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from router.config.settings import DiscoveredConfig, KubernetesConfig, ReplicaConfig
from router.membership.membership import NameReplicas, Source, discovered
from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import describe
from warmroute_common.decoding import convert

log = logging.getLogger("warmroute.membership")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_WATCH_S: Final = 240
"""The API ends a watch after this time; then another one begins."""
_SLACK_S: Final = 15.0
"""A watch that ends this much later has lost its connection."""
_ANSWER_S: Final = 20.0
_GONE: Final = 410
_LINE_BYTES: Final = 8 << 20
"""Largest event: a slice has at most 1000 endpoints."""
_NAMESPACE_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_HTTP: Final = "http"


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of an object or of a list."""

    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct):
    """Conditions of an endpoint; None counts as ready and as not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct):
    """The pod behind an endpoint."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """One endpoint. All its addresses belong to the same pod; the first one is used."""

    addresses: list[str]
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: Target | None = None


class Port(msgspec.Struct):
    """One of a service's ports."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, rename="camel"):
    """Some of the endpoints of a service."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    """The answer to a list."""

    metadata: Metadata
    items: list[Slice]


class WatchEvent(msgspec.Struct):
    """A line of the answer to a watch; ``object`` is a slice, or a status."""

    type: str
    object: dict[str, Any]


class Slices:
    """The current slices of a service, and the replicas in them. Pure."""

    def __init__(self, config: KubernetesConfig, each: DiscoveredConfig) -> None:
        self._config = config
        self._each = each
        self._slices: dict[str, Slice] = {}
        self._known: set[str] = set()
        """URLs of the replicas that have been ready and not terminating since."""

    def replace(self, slices: Iterable[Slice]) -> None:
        """Replace all slices by those of a list."""
        self._slices = {each.metadata.name: each for each in slices}

    def apply(self, event: WatchEvent) -> None:
        """Apply a change."""
        changed = convert(event.object, Slice)
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        else:
            self._slices[changed.metadata.name] = changed

    def replicas(self) -> list[ReplicaConfig]:
        """Return the replicas that are ready, or have been ready and are not terminating.

        A replica that has become unready may just be busy: the router's health probes decide about
        it. A pod with addresses of both families is in slices of both, and is one replica.
        """
        found: dict[str, tuple[ReplicaConfig, bool]] = {}
        for each in sorted(self._slices.values(), key=lambda one: one.address_type):
            port = self._port(each)
            for endpoint in each.endpoints or ():
                if port is None or not endpoint.addresses or endpoint.conditions.terminating:
                    continue
                is_ready = endpoint.conditions.ready is not False
                replica = self._replica(endpoint, port)
                who = replica.url if endpoint.target_ref is None else endpoint.target_ref.uid
                # An endpoint that moves from one slice to another is in both for a while.
                before = found.get(who or replica.url, (replica, False))
                found[who or replica.url] = before[0], before[1] or is_ready
        stay = [one for one, is_ready in found.values() if is_ready or one.url in self._known]
        self._known = {each.url for each in stay}
        return stay

    def _port(self, part: Slice) -> int | None:
        """Return the replicas' port; None if a slice does not say which one it is."""
        if self._config.port is not None:
            return self._config.port
        ports = part.ports or []
        named = [each for each in ports if each.name == _HTTP]
        found_ports = ports if len(ports) == 1 else named
        return found_ports[0].port if found_ports else None

    def _replica(self, endpoint: Endpoint, port: int) -> ReplicaConfig:
        target = endpoint.target_ref
        name = target.name if target is not None and target.kind == "Pod" else None
        host = endpoint.addresses[0]
        return discovered(self._each, self._config.scheme, host, port, name=name or None)


_LIST: Final = msgspec.json.Decoder(SliceList)
_EVENT: Final = msgspec.json.Decoder(WatchEvent)


class _GoneError(Exception):
    """The API no longer has the changes since our version: list all slices again."""


class KubernetesWatch:
    """Follows the slices of a service."""

    def __init__(
        self,
        config: KubernetesConfig,
        each: DiscoveredConfig,
        name: NameReplicas,
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
        """Name the service's replicas, forever.

        While the API cannot be reached the known replicas stay.
        """
        while True:
            try:
                await self._follow()
            except _GoneError:
                log.info("Kubernetes no longer has all changes: listing the replicas again")
                self._failures += 1
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if not self._failures:
                    log.warning("Kubernetes cannot be asked for replicas: %s", describe(error))
                self._failures += 1
            except Exception:  # otherwise no replica would join or leave any longer
                log.exception("watching Kubernetes failed")
                self._failures += 1
            pause_s = self._first_pause_s * 2 ** min(self._failures, 10)
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    async def _follow(self) -> None:
        """List, then watch until an error; raise it, or `_GoneError`."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=await asyncio.to_thread(self._trusted)),
            read_bufsize=_LINE_BYTES,
        ) as session:
            version = await self._list(session)
            while True:
                version = await self._watch(session, version)
                self._failures = 0
                await asyncio.sleep(self._first_pause_s)  # in case watches end at once

    async def _list(self, session: aiohttp.ClientSession) -> str:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with await self._get(session, {}, timeout) as response:
            listed = _LIST.decode(await response.read())
        self._slices.replace(listed.items)
        self._name_replicas()
        return listed.metadata.resource_version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Apply every change after a version until the watch ends; return the last version."""
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
                newer = event.object.get("metadata", {}).get("resourceVersion")
                version = str(newer or version)
                if event.type != "BOOKMARK":
                    self._slices.apply(event)
                    self._name_replicas()
        return version

    def _name_replicas(self) -> None:
        self._name(Source.KUBERNETES, self._slices.replicas())

    # --- the API

    async def _get(
        self, session: aiohttp.ClientSession, asked: dict[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Ask for the slices; raise `_GoneError`, or ValueError for any other status."""
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
            text = (await response.text())[:300]
            response.close()
            raise ValueError(f"{url} answers {response.status}: {text}")
        return response

    def _credentials(self) -> tuple[str | None, str]:
        """Return the token and the namespace. Files are read each time: tokens change hourly."""
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
            "the router does not run in a pod (KUBERNETES_SERVICE_HOST is not set): "
            "set discovery.kubernetes.api_url"
        )
    return f"https://{join_host_port(host, int(os.environ.get('KUBERNETES_SERVICE_PORT', '443')))}"


def _error(event: WatchEvent) -> Exception:
    if event.object.get("code") == _GONE:
        return _GoneError()
    return ValueError(f"the watch ended: {event.object.get('message', event.object)}")
