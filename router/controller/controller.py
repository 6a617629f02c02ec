"""LMCache's controller, embedded in the router.

Two small web applications beside the proxy: the API, for operators and their
programs, and the monitor, where replicas' agents register. What is asked is
done by the agents; the controller knows where they are, and nothing of chunks.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from router.access import Access
from router.config import AccessConfig
from router.controller.agents import AgentCalls
from router.controller.api import ControllerApi
from router.controller.monitor import MAX_BODY_BYTES, Monitor
from router.controller.others import OtherInstances
from router.controller.registry import Configured, Registry
from router.controller.secret import Guard
from warmroute_common.agent_protocol import Registration
from warmroute_common.api_errors import OverloadedError
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.http_server import BODIES, Bodies, errors_answered

log = logging.getLogger("warmroute.controller")

MAX_REQUESTS: Final = 128
"""Requests under way at once on each of the two ports; more are refused with 503."""


class Controller:
    """The state of the two applications; `api` and `monitor` make them."""

    def __init__(
        self,
        configured: Callable[[], Sequence[Configured]],
        session: aiohttp.ClientSession,
        *,
        limit_bytes: int,
        body_s: float = 60.0,
        secret: str | None = None,
        access: Access | None = None,
        fleet_secret: FleetSecret | None = None,
        beside: Sequence[web.RouteDef] = (),
        beside_instances: Callable[[], list[dict[str, Any]]] = list,
        others: OtherInstances | None = None,
        guards_monitor: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``configured`` tells the configuration's instances, ``session`` reaches agents.

        ``beside`` are routes that are served on the API's port too, ``beside_instances`` tells
        the instances that these know, ``others`` calls instances that have no agent. With a
        ``secret``, or admin keys in ``access``, that port asks every caller for it, and with
        ``guards_monitor`` the other one too. With a ``fleet_secret``, which agents are shown, both
        ports ask for any of them.
        """
        self.registry = Registry(configured)
        self._limit_bytes = limit_bytes
        self._body_s = body_s
        self._guard = Guard(secret, access or Access(AccessConfig()), fleet_secret)
        self._guards_monitor = guards_monitor or fleet_secret is not None
        self._beside = beside
        self._clock = clock
        self._api = ControllerApi(
            self.registry,
            AgentCalls(session, fleet_secret),
            clock,
            wall_clock,
            beside=beside_instances,
            others=others,
        )
        self._monitor = Monitor(self.registry, clock)

    def api(self) -> web.Application:
        """Make the API's application."""
        routes = [*self._api.routes(), *self._beside]
        return self._application(routes, self._limit_bytes, is_guarded=True)

    def monitor(self) -> web.Application:
        """Make the monitor's application."""
        return self._application(
            self._monitor.routes(), MAX_BODY_BYTES, is_guarded=self._guards_monitor
        )

    def registrations(self) -> list[Registration]:
        """Return the registrations of the agents that live."""
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
        app.add_routes(routes)
        return app
