"""The HTTP API of LMCache's coordinator, as far as routing needs it.

LMCache's servers register and report here; its clients look keys up and order prefetches. Errors
have LMCache's shape: ``{"detail": ...}``, with 422 for a malformed body.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from router.lmcache.coordinator import Coordinator
from router.lmcache.coordinator_protocol import (
    DirectoryLookupCall,
    EventsCall,
    MalformedCallError,
    ObjectKey,
    ServerPrefetchCall,
    ServerRegistration,
    check_count,
    prompt_keys,
    read_call,
)
from router.lmcache.server_client import LmcacheServerClient, LmcacheServerError, prefetch_path
from warmroute_common.api_errors import (
    ApiError,
    NotFoundError,
    NotSupportedError,
    UpstreamFailedError,
)
from warmroute_common.http_server import as_json, leaves_body, read_body

log = logging.getLogger("warmroute.lmcache")

_USAGE: Final = "LMCache's usage reports; ask each LMCache server itself (GET /status)"
_QUOTAS: Final = "LMCache's quotas; limit L2 where each LMCache server is started (--l2-adapter)"
_NOT_SERVED: Final = {
    "/instances/usage": _USAGE,
    "/instances/{instance_id}/usage": _USAGE,
    "/directory/stats": _USAGE,
    "/directory/keys": "LMCache's listing of keys; look up a prompt with POST /directory/lookup",
    "/cache/delete": "LMCache's deletion of keys; ask the LMCache server itself "
    "(DELETE /cache/objects)",
    "/cache/pins": "LMCache's pins of keys in L2; there is no replacement",
    "/quota": _QUOTAS,
    "/quota/{rest:.*}": _QUOTAS,
}
"""Paths of LMCache's coordinator that are refused by name."""


class CoordinatorApi:
    """Handlers on the controller's port."""

    def __init__(
        self,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        servers_changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``servers_changed`` is called when a server registers or leaves."""
        self._coordinator = coordinator
        self._session = session
        self._servers_changed = servers_changed
        self._clock = clock
        self._wall_clock = wall_clock

    def routes(self) -> list[web.RouteDef]:
        """Return the routes. ``GET /instances`` is the controller's: it lists all kinds."""
        served = [
            web.post("/instances", self.register),
            web.put("/instances/{instance_id}/heartbeat", self.heartbeat),
            web.post("/events", self.events),
            web.post("/directory/lookup", self.lookup),
            web.post("/directory/blend-lookup", self.blend_lookup),
            web.post("/cache/prefetches", self.prefetch),
            web.get("/cache/prefetches/{instance_id}/{request_id}", self.prefetch_status),
            web.get("/healthz", self.healthz),
        ]
        refused = [web.route("*", path, _refuse(what)) for path, what in _NOT_SERVED.items()]
        # Last: a DELETE of a refused path must not take its name for a server's.
        last = web.delete("/instances/{instance_id}", self.deregister)
        return [self._with_details(each) for each in [*served, *refused, last]]

    def listing(self) -> list[dict[str, Any]]:
        """Return the registered servers for ``GET /instances``."""
        return [each.listing() for each in self._coordinator.servers.all()]

    # --- servers

    async def register(self, request: web.Request) -> web.Response:
        registration = await read_call(request, ServerRegistration)
        answer = self._coordinator.register(registration, self._clock(), self._wall_clock())
        self._servers_changed()
        return as_json(answer)

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Record a heartbeat; 404 makes the server register again."""
        name = request.match_info["instance_id"]
        if self._coordinator.servers.heartbeat(name, self._clock()):
            return as_json({"instance_id": name})
        return as_json({"error": f"unknown instance {name}; re-register"}, status=404)

    async def deregister(self, request: web.Request) -> web.Response:
        """Forget a server that ends; an unknown one is not an error."""
        self._coordinator.deregister(request.match_info["instance_id"])
        self._servers_changed()
        return web.Response(status=204)

    async def events(self, request: web.Request) -> web.Response:
        call = await read_call(request, EventsCall)
        return as_json(self._coordinator.apply(call.batches, self._clock()))

    async def healthz(self, request: web.Request) -> web.Response:
        return as_json({"status": "healthy"})

    # --- keys

    async def lookup(self, request: web.Request) -> web.Response:
        """Answer which servers hold the given keys, or a prompt's chunks.

        All ranks and groups of a chunk are said to be where its leading key is. Accesses and tokens
        are not kept.
        """
        call = await read_call(request, DirectoryLookupCall)
        keys = [each.key() for each in call.keys]
        chunks = len(keys)
        if not keys:
            chunks, keys = prompt_keys(call, self._coordinator.chunk_tokens)
        check_count(len(keys))
        return as_json({"chunks": chunks, "results": [self._found(key) for key in keys]})

    async def blend_lookup(self, request: web.Request) -> web.Response:
        """Answer that no chunk of another server matches inside a prompt (CacheBlend).

        LMCache's coordinator answers the same unless it runs with ``--enable-blend-lookup``. Each
        server then blends its own chunks only.
        """
        await read_body(request)
        if not self._coordinator.counts["blend"]:
            log.warning("CacheBlend finds chunks of the LMCache server itself only, not of others")
        self._coordinator.counts["blend"] += 1
        return as_json({"matches": []})

    async def prefetch(self, request: web.Request) -> web.Response:
        """Pass a prefetch order on to a server."""
        call = await read_call(request, ServerPrefetchCall)
        order = msgspec.structs.asdict(call)
        name = order.pop("instance_id")
        try:
            status = await self._server(name).submit_prefetch(order)
        except LmcacheServerError as error:
            raise UpstreamFailedError(f"prefetch submit to {name!r} failed: {error}") from None
        return as_json(
            {
                "instance_id": name,
                "request_id": status.request_id,
                "chunks": status.chunks,
                "status": status.status,
            }
        )

    async def prefetch_status(self, request: web.Request) -> web.Response:
        """Pass on a server's answer about a prefetch."""
        name, request_id = (request.match_info[each] for each in ("instance_id", "request_id"))
        try:
            status, answer = await self._server(name).exchange("GET", prefetch_path(request_id))
        except LmcacheServerError as error:
            raise UpstreamFailedError(f"prefetch status of {name!r} failed: {error}") from None
        return web.Response(status=status, body=answer, content_type="application/json")

    # --- parts of the above

    def _server(self, name: str) -> LmcacheServerClient:
        server = self._coordinator.servers.get(name)
        if server is None:
            raise NotFoundError(f"no MP server registered with instance_id={name!r}")
        return LmcacheServerClient(self._session, server.url)

    def _found(self, key: ObjectKey) -> dict[str, Any]:
        return {
            "key": key.encoded(),
            "placements": self._coordinator.placements(key),
            "access_count": 0,
            "token_ids": [],
        }

    def _with_details(self, route: web.RouteDef) -> web.RouteDef:
        """Return a route whose errors have the shape that LMCache's clients parse."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                return await route.handler(request)
            except ApiError as error:
                if isinstance(error, MalformedCallError):
                    self._coordinator.counts["malformed"] += 1
                response = as_json({"detail": error.message}, status=error.status)
                response.headers.update(error.headers)
                if leaves_body(error):
                    response.force_close()
                return response

        return web.route(route.method, route.path, handler)


def _refuse(what: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        raise NotSupportedError(f"{request.method} {request.path}: Warmroute does not serve {what}")

    return handler
