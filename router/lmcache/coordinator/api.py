"""The HTTP calls of LMCache's coordinator, answered as it answers them.

Its servers register and report here; its other clients look keys up, pin, and have servers
prefetch. Refusals have its shape: ``{"detail": ...}``, 422 for a body that is malformed.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from aiohttp import web

from router.lmcache.coordinator.cache_api import CacheApi
from router.lmcache.coordinator.calls import (
    BlendCall,
    LookupCall,
    MalformedCallError,
    check_count,
    keys_of,
    page_of,
    read_call,
    tier_of,
)
from router.lmcache.coordinator.records import Held, Place
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.coordinator.usage import summary
from router.lmcache.wire import EventsCall, ObjectKey, RegisterCall
from warmroute_common.api_errors import ApiError, NotFoundError
from warmroute_common.http_server import as_json, leaves_body
from warmroute_common.tasks import in_slices

log = logging.getLogger("warmroute.lmcache")


class CoordinatorApi:
    """Handlers on the controller's port."""

    def __init__(
        self,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        members_changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``session`` reaches the servers; ``members_changed`` hears when one comes or goes."""
        self._coordinator = coordinator
        self._cache = CacheApi(coordinator, session)
        self._members_changed = members_changed
        self._clock = clock
        self._wall_clock = wall_clock

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; ``GET /instances`` is the controller's, which lists both kinds."""
        own = [
            web.post("/instances", self.register),
            web.put("/instances/{instance_id}/heartbeat", self.heartbeat),
            web.delete("/instances/{instance_id}", self.deregister),
            web.get("/instances/usage", self.usage),
            web.get("/instances/{instance_id}/usage", self.usage_of_one),
            web.post("/events", self.events),
            web.post("/directory/lookup", self.lookup),
            web.post("/directory/blend-lookup", self.blend_lookup),
            web.get("/directory/keys", self.keys),
            web.get("/directory/stats", self.stats),
            web.get("/healthz", self.healthz),
        ]
        return [self._refusing(each) for each in [*own, *self._cache.routes()]]

    def listing(self) -> list[dict[str, Any]]:
        """Return the servers as ``GET /instances`` shows them."""
        return [each.listing() for each in self._coordinator.members.all()]

    # --- members

    async def register(self, request: web.Request) -> web.Response:
        """Take in a server."""
        call = await read_call(request, RegisterCall)
        answer = self._coordinator.register(call, self._clock(), self._wall_clock())
        self._members_changed()
        return as_json(answer)

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Note that a server lives; 404 has it register anew."""
        name = request.match_info["instance_id"]
        if self._coordinator.members.heartbeat(name, self._clock()):
            return as_json({"instance_id": name})
        return as_json({"error": f"unknown instance {name}; re-register"}, status=404)

    async def deregister(self, request: web.Request) -> web.Response:
        """Forget a server that ends, whether or not it is known."""
        self._coordinator.deregister(request.match_info["instance_id"])
        self._members_changed()
        return web.Response(status=204)

    async def usage(self, request: web.Request) -> web.Response:
        """Answer what every server holds and could hold."""
        return as_json(self._coordinator.usage())

    async def usage_of_one(self, request: web.Request) -> web.Response:
        """Answer the same of one server."""
        name = request.match_info["instance_id"]
        found = self._coordinator.usage()["instances"]
        answer = next((each for each in found if each["instance_id"] == name), None)
        if answer is None:
            raise NotFoundError(f"unknown instance {name!r}")
        return as_json(answer)

    # --- events and keys

    async def events(self, request: web.Request) -> web.Response:
        """Take over servers' events."""
        call = await read_call(request, EventsCall)
        return as_json(self._coordinator.apply(call.batches, self._clock()))

    async def lookup(self, request: web.Request) -> web.Response:
        """Answer where keys are, or those of a prompt's chunks."""
        call = await read_call(request, LookupCall)
        directory, keys = self._coordinator.directory, [each.key() for each in call.keys]
        chunks = len(keys)
        if not keys:
            chunks, keys = keys_of(call, self._coordinator.chunk_tokens)
            keys = directory.in_all_groups(keys)
        check_count(len(keys))
        results = [
            self._shown(key, directory.get(key).places.items())
            | {"token_ids": directory.token_ids(key.chunk_hash)}
            for key in keys
        ]
        return as_json({"chunks": chunks, "results": results})

    async def blend_lookup(self, request: web.Request) -> web.Response:
        """Answer which chunks occur anywhere in a prompt, for CacheBlend: none.

        So answers LMCache's coordinator too, unless it is started with ``--enable-blend-lookup``:
        no index of chunks by their tokens alone is kept. Servers match their own chunks then.
        """
        await read_call(request, BlendCall)
        if not self._coordinator.counts["blend"]:
            log.warning("an LMCache server looks for chunks to blend: other servers' are not found")
        self._coordinator.counts["blend"] += 1
        return as_json({"matches": []})

    async def keys(self, request: web.Request) -> web.Response:
        """Answer a page of the keys that are known, of all or in a tier, server or backend."""
        query, part, tier = request.query, page_of(request), tier_of(request, "all")
        name, backend = query.get("instance_id", ""), query.get("backend", "")
        directory = self._coordinator.directory
        found: list[tuple[ObjectKey, list[tuple[Place, Held]]]] = []
        async for some in in_slices(directory.keys()):
            for key in some:
                places = [
                    (place, held)
                    for place, held in directory.get(key).places.items()
                    if tier in ("all", place.tier)
                    and name in ("", held.instance_id)
                    and backend in ("", place.backend)
                ]
                if places:
                    found.append((key, places))
        keys = [
            self._shown(*each) | {"num_tokens": len(directory.token_ids(each[0].chunk_hash))}
            for each in found[part]
        ]
        return as_json({"total": len(found), "keys": keys})

    async def stats(self, request: web.Request) -> web.Response:
        """Answer how many keys and bytes are known, by tier and server."""
        directory = self._coordinator.directory
        return as_json(summary(directory.totals, len(directory)))

    async def healthz(self, request: web.Request) -> web.Response:
        """Answer a probe."""
        return as_json({"status": "healthy"})

    # --- parts of the above

    def _refusing(self, route: web.RouteDef) -> web.RouteDef:
        """Return a route whose refusals have the shape that LMCache's clients parse."""

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

    def _shown(self, key: ObjectKey, places: Iterable[tuple[Place, Held]]) -> dict[str, Any]:
        placements = [
            {
                "instance_id": held.instance_id,
                "incarnation": held.incarnation,
                "tier": place.tier,
                "backend": place.backend,
                "size_bytes": held.size_bytes,
                "shared": place.shared,
            }
            for place, held in places
        ]
        placements.sort(key=lambda each: (each["instance_id"], each["tier"], each["backend"]))
        count = self._coordinator.directory.get(key).access_count
        return {"key": key.encoded(), "placements": placements, "access_count": count}
