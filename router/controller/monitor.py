"""The controller's monitor port: where agents register and show that they live."""

import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from router.config import is_same_url, join_host_port
from router.controller.calls import RegisterCall, answering, read_call
from router.controller.registry import Registered, Registry
from warmroute_common.agent_protocol import Heartbeat, Registration
from warmroute_common.api_errors import ApiError, BadRequestError, NotFoundError
from warmroute_common.http_server import as_json

log = logging.getLogger("warmroute.controller")

MAX_BODY_BYTES: Final = 64 << 10
_ANYWHERE: Final = frozenset({"", "0.0.0.0", "::"})


class Monitor:
    """Handlers of the monitor's port."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return the monitor's routes."""
        return [
            web.post("/register", self.register),
            answering("/heartbeat", Heartbeat, self.heartbeat),
            answering("/deregister", Heartbeat, self.deregister),
        ]

    async def register(self, request: web.Request) -> web.Response:
        """Take in an agent's `Registration`; 409 when its name is another's by configuration."""
        call = await read_call(request, RegisterCall)
        agent_url = _reachable(call.agent_url, request.remote, "agent_url")
        openai_url = call.openai_url and _reachable(call.openai_url, request.remote, "openai_url")
        registration = msgspec.structs.replace(call, agent_url=agent_url, openai_url=openai_url)
        try:
            before = self._registry.register(registration, self._clock())
        except ApiError as error:
            log.error("refused to register %s: %s", registration.instance_id, error)
            raise
        _log_registered(registration, before)
        return as_json({"registered": registration.instance_id})

    async def heartbeat(self, beat: Heartbeat) -> dict[str, str]:
        """Note a `Heartbeat`; 404 tells its agent to register (anew)."""
        if not self._registry.heartbeat(beat, self._clock()):
            raise _unknown(beat)
        return {"known": beat.instance_id}

    async def deregister(self, gone: Heartbeat) -> dict[str, str]:
        """Forget an agent that ends."""
        if not self._registry.deregister(gone):
            raise _unknown(gone)
        log.info("%s has left", gone.instance_id)
        return {"forgotten": gone.instance_id}


def _reachable(url: str, remote: str | None, field: str) -> str:
    """Return a URL of an agent's, with where it came from for a host that it does not name."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_base = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or port is None or not is_base:
        raise BadRequestError(f"{field} is '{url}'; give it like http://host:port", param=field)
    if host in _ANYWHERE:
        if remote is None:
            raise BadRequestError(f"{field} must name a host here", param=field)
        host = remote.removeprefix("::ffff:")
    return f"{parts.scheme}://{join_host_port(host, port)}{parts.path.rstrip('/')}"


def _log_registered(now: Registration, before: Registered | None) -> None:
    if before is None:
        log.info("%s has registered, with its agent at %s", now.instance_id, now.agent_url)
    elif not is_same_url(before.registration.agent_url, now.agent_url):
        log.warning(
            "%s is claimed by the agent at %s now, and was by that at %s: two instances must "
            "not have one lmcache_instance_id",
            now.instance_id,
            now.agent_url,
            before.registration.agent_url,
        )
    elif before.registration.incarnation != now.incarnation:
        log.info("%s has started anew", now.instance_id)


def _unknown(beat: Heartbeat) -> NotFoundError:
    return NotFoundError(
        f"'{beat.instance_id}' is not registered in this incarnation: register first",
        param="instance_id",
        code="unknown_instance",
    )
