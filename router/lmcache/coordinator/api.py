"""The HTTP calls of LMCache's coordinator, answered as it answers them.

Its servers register and report here; its other clients look keys up, pin, and have servers
prefetch. Refusals have its shape: ``{"detail": ...}``, 422 for a body that is malformed.
"""

# ruff: noqa: N818  (names as `router.config` has them)

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from router.config import ApiError
from router.http import as_json, read_body
from router.lmcache.coordinator.pins import Pins
from router.lmcache.coordinator.records import Record
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import (
    EventsCall,
    LookupCall,
    ObjectKey,
    PrefetchCall,
    PrefetchStatus,
    RegisterCall,
    TokensCall,
    rank_of_world,
)
from router.residency import lmcache_chain
from router.staging import AgentError

_MAX_KEYS: Final = 100_000
_LONGEST_PAGE: Final = 10_000
_PAGE: Final = 1_000

_T = TypeVar("_T", bound=msgspec.Struct)


class Refused(ApiError):
    """A refusal, in the shape that LMCache's clients parse."""

    def openai_body(self) -> dict[str, Any]:
        """Return that body."""
        return {"detail": self.message}


class Malformed(Refused):
    """A body or query that is none of LMCache's (422)."""

    status = 422


class TooMany(Refused):
    """More keys than are looked at in one call (400)."""

    status = 400


class UnknownServer(Refused):
    """No server of that name has registered (404)."""

    status = 404


class ServerFailed(Refused):
    """The server that was to do it does not answer, or refuses (502)."""

    status = 502


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
        self._session = session
        self._members_changed = members_changed
        self._clock = clock
        self._wall_clock = wall_clock
        self._pins = Pins()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; ``GET /instances`` is the controller's, which lists both kinds."""
        return [
            web.post("/instances", self.register),
            web.put("/instances/{instance_id}/heartbeat", self.heartbeat),
            web.delete("/instances/{instance_id}", self.deregister),
            web.get("/instances/usage", self.usage),
            web.get("/instances/{instance_id}/usage", self.usage_of_one),
            web.post("/events", self.events),
            web.post("/directory/lookup", self.lookup),
            web.post("/cache/prefetches", self.prefetch),
            web.get("/cache/prefetches/{instance_id}/{request_id}", self.prefetch_status),
            web.post("/cache/pins", self.pin),
            web.delete("/cache/pins", self.unpin),
            web.get("/cache/pins", self.pins),
            web.get("/healthz", self.healthz),
        ]

    def listing(self) -> list[dict[str, Any]]:
        """Return the servers as ``GET /instances`` shows them."""
        return [each.listing() for each in self._coordinator.members.all()]

    # --- members

    async def register(self, request: web.Request) -> web.Response:
        """Take in a server."""
        call = await self._read(request, RegisterCall)
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
            raise UnknownServer(f"unknown instance {name!r}")
        return as_json(answer)

    # --- events and keys

    async def events(self, request: web.Request) -> web.Response:
        """Take over servers' events."""
        call = await self._read(request, EventsCall)
        return as_json(self._coordinator.apply(call.batches, self._clock()))

    async def lookup(self, request: web.Request) -> web.Response:
        """Answer where keys are, or those of a prompt's chunks."""
        call = await self._read(request, LookupCall)
        keys = [each.key() for each in call.keys]
        chunks = len(keys)
        if not keys:
            chunks, keys = self._keys(call)
        _check_count(len(keys))
        directory = self._coordinator.directory
        results = [
            _found(key, directory.get(key), directory.token_ids(key.chunk_hash)) for key in keys
        ]
        return as_json({"chunks": chunks, "results": results})

    # --- what servers are told to do

    async def prefetch(self, request: web.Request) -> web.Response:
        """Pass a prefetch on to a server."""
        call = await self._read(request, PrefetchCall)
        body = msgspec.structs.asdict(call)
        name = body.pop("instance_id")
        server = self._server(name)
        try:
            told = await server.ask("POST", "/cache/prefetches", PrefetchStatus, body)
        except AgentError as error:
            raise ServerFailed(f"prefetch submit to {name!r} failed: {error}") from None
        return as_json(
            {
                "instance_id": name,
                "request_id": told.request_id,
                "chunks": told.chunks,
                "status": told.status,
            }
        )

    async def prefetch_status(self, request: web.Request) -> web.Response:
        """Answer what a server says of a prefetch."""
        name, request_id = (request.match_info[each] for each in ("instance_id", "request_id"))
        server, path = self._server(name), f"/cache/prefetches/{quote(request_id, safe='')}"
        try:
            status, answer = await server.call("GET", path)
        except AgentError as error:
            raise ServerFailed(f"prefetch status of {name!r} failed: {error}") from None
        return web.Response(status=status, body=answer, content_type="application/json")

    async def pin(self, request: web.Request) -> web.Response:
        """Pin the keys of a prompt's chunks."""
        return await self._pin(request, self._pins.pin, "pinned")

    async def unpin(self, request: web.Request) -> web.Response:
        """End `pin`, once."""
        return await self._pin(request, self._pins.unpin, "unpinned")

    async def pins(self, request: web.Request) -> web.Response:
        """Answer a page of the pinned keys."""
        offset = _number(request, "offset", 0, 0, None)
        limit = _number(request, "limit", _PAGE, 1, _LONGEST_PAGE)
        query = request.query
        salt, model = query.get("cache_salt", ""), query.get("model_name", "")
        return as_json(self._pins.page(salt, model, offset, limit))

    async def healthz(self, request: web.Request) -> web.Response:
        """Answer a probe."""
        return as_json({"status": "healthy"})

    # --- parts of the above

    async def _read(self, request: web.Request, kind: type[_T]) -> _T:
        body = await read_body(request)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._coordinator.counts["malformed"] += 1
            raise Malformed(f"{request.path}: {error}") from None

    def _keys(self, call: LookupCall | TokensCall) -> tuple[int, list[ObjectKey]]:
        """Return how many chunks a prompt has, and their keys; raise `TooMany`."""
        chunk_tokens, world_size = self._coordinator.chunk_tokens, call.world_size
        _check_count(len(call.token_ids) // chunk_tokens * world_size)
        chain = lmcache_chain(call.token_ids, chunk_tokens)
        ranks = [rank_of_world(world_size, rank) for rank in range(world_size)]
        name, salt = call.model_name, call.cache_salt
        keys = [ObjectKey(each, name, rank, 0, salt) for each in chain for rank in ranks]
        return len(chain), keys

    def _server(self, name: str) -> LmcacheServer:
        member = self._coordinator.members.get(name)
        if member is None:
            raise UnknownServer(f"no MP server registered with instance_id={name!r}")
        return LmcacheServer(self._session, member.url)

    async def _pin(
        self, request: web.Request, act: Callable[[list[ObjectKey]], None], status: str
    ) -> web.Response:
        call = await self._read(request, TokensCall)
        chunks, keys = self._keys(call)
        act(keys)
        return as_json({"requested": chunks, "affected": len(keys), "status": status})


def _check_count(keys: int) -> None:
    if keys > _MAX_KEYS:
        raise TooMany(f"one call looks at {_MAX_KEYS} keys at most, these are {keys}")


def _found(key: ObjectKey, record: Record, token_ids: list[int]) -> dict[str, Any]:
    placements = [
        {
            "instance_id": held.instance_id,
            "incarnation": held.incarnation,
            "tier": place.tier,
            "backend": place.backend,
            "size_bytes": held.size_bytes,
            "shared": place.shared,
        }
        for place, held in record.places.items()
    ]
    placements.sort(key=lambda each: (each["instance_id"], each["tier"], each["backend"]))
    return {
        "key": key.encoded(),
        "placements": placements,
        "token_ids": token_ids,
        "access_count": record.access_count,
    }


def _number(request: web.Request, name: str, default: int, least: int, most: int | None) -> int:
    """Return a number of the query; raise `Malformed` for what is none, or out of range."""
    text = request.query.get(name, str(default))
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        raise Malformed(f"{name}={text}: it must be a number from {least} to {most or 'any'}")
    return number
