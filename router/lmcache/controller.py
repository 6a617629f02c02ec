"""LMCache's controller, embedded in the router: two small web applications next to the proxy.

The API is for operators and their programs; at the monitor the replicas' agents register. The
controller knows where the agents are, and nothing about chunks.
"""

import asyncio
import binascii
import hmac
import logging
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Annotated, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Meta

from router.api.access import Access
from router.config.settings import AccessConfig
from router.lmcache.controller_api import AgentCaller, ControllerApi, post_route, read_json
from router.lmcache.instance_registry import (
    ConfiguredInstance,
    InstanceRegistry,
    RegisteredInstance,
)
from router.lmcache.lmcache import Lmcache
from warmroute_common.addresses import is_same_url, join_host_port
from warmroute_common.agent_protocol import Heartbeat, Registration
from warmroute_common.api_errors import (
    ApiError,
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    OverloadedError,
    UnauthorizedError,
)
from warmroute_common.fleet_secret import FleetSecret, may_be_of_a_page
from warmroute_common.http_server import (
    BODIES,
    Bodies,
    as_json,
    errors_answered,
    expecting_later,
)

log = logging.getLogger("warmroute.controller")

MAX_REQUESTS: Final = 128
"""Concurrent requests per port; further ones are refused with 503."""
_MAX_REGISTRATION_BYTES: Final = 64 << 10
_ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})


class Controller:
    """State of the two applications, which `api` and `monitor` create."""

    def __init__(
        self,
        configured: Callable[[], Sequence[ConfiguredInstance]],
        session: aiohttp.ClientSession,
        *,
        limit_bytes: int,
        body_s: float = 60.0,
        secret: str | None = None,
        access: Access | None = None,
        fleet_secret: FleetSecret | None = None,
        lmcache: Lmcache | None = None,
        guards_monitor: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``configured`` returns the instances of the configuration as it is now.

        The API's port also serves the coordinator of ``lmcache``, and calls for its workers.

        With a ``secret``, or admin keys in ``access``, the API asks every caller for it, and with
        ``guards_monitor`` the monitor does too. With a ``fleet_secret``, which agents also get,
        both ports ask for any of them.
        """
        self.registry = InstanceRegistry(configured)
        self._limit_bytes = limit_bytes
        self._body_s = body_s
        self._guard = ControllerGuard(secret, access or Access(AccessConfig()), fleet_secret)
        self._guards_monitor = guards_monitor or fleet_secret is not None
        self._lmcache = lmcache
        self._clock = clock
        self._api = ControllerApi(
            self.registry, AgentCaller(session, fleet_secret), clock, lmcache=lmcache
        )
        self._registration = RegistrationApi(self.registry, clock)

    def api(self) -> web.Application:
        """Create the API's application."""
        coordinator = () if self._lmcache is None else self._lmcache.routes()
        return self._application(
            [*self._api.routes(), *coordinator], self._limit_bytes, is_guarded=True
        )

    def monitor(self) -> web.Application:
        """Create the monitor's application."""
        return self._application(
            self._registration.routes(), _MAX_REGISTRATION_BYTES, is_guarded=self._guards_monitor
        )

    def registrations(self) -> list[Registration]:
        """Return the registrations of the agents that are alive."""
        self._expire()
        return self.registry.registrations()

    def _expire(self) -> None:
        for gone in self.registry.expire(self._clock()):
            name, url = gone.registration.instance_id, gone.registration.agent_url
            log.warning("%s (%s) has missed its heartbeats and is forgotten", name, url)

    def _application(
        self, routes: Sequence[web.RouteDef], limit_bytes: int, *, is_guarded: bool
    ) -> web.Application:
        under_way = asyncio.Semaphore(MAX_REQUESTS)

        @web.middleware
        async def admitted(request: web.Request, handler: Handler) -> web.StreamResponse:
            if is_guarded:
                self._guard.check(request)
            else:
                self._guard.check_page(request)
            if under_way.locked():
                raise OverloadedError(f"{MAX_REQUESTS} requests are under way; ask again later")
            async with under_way:
                self._expire()
                return await handler(request)

        app = web.Application(middlewares=[errors_answered, admitted], client_max_size=limit_bytes)
        app[BODIES] = Bodies(within_s=self._body_s, limit_bytes=MAX_REQUESTS * limit_bytes)
        app.add_routes(expecting_later(routes))
        return app


class ControllerGuard:
    """Accepts the controller's own secret, admin keys, and the fleet's secret.

    Callers send one as a bearer token, or as the password of basic authentication with any user
    name. The latter is for programs that take nothing but a URL: ``http://any:SECRET@host:9000``.
    Without any secret every caller is accepted except web pages of other sites.
    """

    def __init__(
        self, secret: str | None, access: Access, fleet_secret: FleetSecret | None
    ) -> None:
        self._secret = secret
        self._access = access
        self._fleet_secret = fleet_secret

    def check(self, request: web.Request) -> None:
        """Raise `UnauthorizedError` without a valid secret, `ForbiddenError` for a web page."""
        has_secret = self._secret is not None or self._fleet_secret is not None
        if not has_secret and not self._access.has_admin_keys:
            self.check_page(request)
            return
        shown = _shown_secret(request)
        if not self._is_known(shown) and not self._access.is_admin_key(shown):
            raise UnauthorizedError(
                "this port asks for controller.secret, an admin key or the fleet's secret: as a "
                "bearer token, or in the URL, http://any:SECRET@host:port"
            )

    def check_page(self, request: web.Request) -> None:
        """Raise `ForbiddenError` if a web page in a browser on this machine may have sent this."""
        if may_be_of_a_page(request.headers.get("Host"), request.headers.get("Origin")):
            raise ForbiddenError(
                "a web page may have sent this, by its Host or Origin header: name this machine "
                "by localhost or its address, or set controller.secret"
            )

    def _is_known(self, shown: str) -> bool:
        # As bytes: compare_digest takes no text outside ASCII.
        is_own = self._secret is not None and hmac.compare_digest(
            shown.encode(errors="replace"), self._secret.encode()
        )
        return is_own or (self._fleet_secret is not None and self._fleet_secret.is_known_by(shown))


def _shown_secret(request: web.Request) -> str:
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return _password(value.strip()) if kind.lower() == "basic" else ""


def _password(encoded: str) -> str:
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


class AgentRegistration(Registration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /register`` at the monitor: a `Registration` with checked values."""

    # Printable ASCII, because logs and answers contain it.
    instance_id: Annotated[str, Meta(pattern=r"^[!-~]([ -~]{0,254}[!-~])?\Z")]
    transfer_port: Annotated[int, Meta(ge=1, le=65535)] | None
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]


class RegistrationApi:
    """Handlers of the monitor's port, where agents register and send heartbeats."""

    def __init__(self, registry: InstanceRegistry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/register", self.register),
            post_route("/heartbeat", Heartbeat, self.heartbeat),
            post_route("/deregister", Heartbeat, self.deregister),
        ]

    async def register(self, request: web.Request) -> web.Response:
        """Register an agent; 409 if its name is configured with another agent."""
        body = await read_json(request, AgentRegistration)
        agent_url = _reachable_url(body.agent_url, request.remote, "agent_url")
        openai_url = body.openai_url and _reachable_url(
            body.openai_url, request.remote, "openai_url"
        )
        registration = msgspec.structs.replace(body, agent_url=agent_url, openai_url=openai_url)
        try:
            before = self._registry.register(registration, self._clock())
        except ApiError as error:
            log.error("refused to register %s: %s", registration.instance_id, error)
            raise
        _log_registered(registration, before)
        return as_json({"registered": registration.instance_id})

    async def heartbeat(self, beat: Heartbeat) -> dict[str, str]:
        """Record a heartbeat; 404 makes the agent register again."""
        if not self._registry.heartbeat(beat, self._clock()):
            raise _unknown(beat)
        return {"known": beat.instance_id}

    async def deregister(self, gone: Heartbeat) -> dict[str, str]:
        """Forget an agent that ends."""
        if not self._registry.deregister(gone):
            raise _unknown(gone)
        log.info("%s has left", gone.instance_id)
        return {"forgotten": gone.instance_id}


def _reachable_url(url: str, remote: str | None, field: str) -> str:
    """Return an agent's URL; a host that stands for any address becomes the sender's address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_base = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or port is None or not is_base:
        raise BadRequestError(f"{field} is '{url}'; write it like http://host:port", param=field)
    if host in _ANY_ADDRESS:
        if remote is None:
            raise BadRequestError(f"{field} must name a host here", param=field)
        host = remote.removeprefix("::ffff:")
    return f"{parts.scheme}://{join_host_port(host, port)}{parts.path.rstrip('/')}"


def _log_registered(now: Registration, before: RegisteredInstance | None) -> None:
    if before is None:
        log.info("%s has registered, with its agent at %s", now.instance_id, now.agent_url)
    elif not is_same_url(before.registration.agent_url, now.agent_url):
        log.warning(
            "the agent at %s has registered as %s, which was the agent at %s: two instances must "
            "not have one lmcache_instance_id",
            now.agent_url,
            now.instance_id,
            before.registration.agent_url,
        )
    elif before.registration.incarnation != now.incarnation:
        log.info("%s has restarted", now.instance_id)


def _unknown(beat: Heartbeat) -> NotFoundError:
    return NotFoundError(
        f"'{beat.instance_id}' is not registered in this incarnation: register first",
        param="instance_id",
        code="unknown_instance",
    )
