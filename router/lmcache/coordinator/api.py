"""The HTTP calls of LMCache's coordinator, answered as it answers them.

Its servers register and report here; its other clients look keys up, pin, and have servers
prefetch. Refusals have its shape: ``{"detail": ...}``, 422 for a body that is malformed.
"""

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
import orjson
from aiohttp import web

from router.config import ApiError
from router.http import read_body
from router.lmcache.coordinator.pins import Pins
from router.lmcache.coordinator.records import Record
from router.lmcache.coordinator.state import Coordinator
from router.lmcache.server import LmcacheServer
from router.lmcache.wire import (
    EventsCall,
    LookupCall,
    ObjectKey,
    PrefetchCall,
    RegisterCall,
    TokensCall,
    rank_of_world,
)
from router.residency import lmcache_chain
from router.staging import AgentError

_MAX_KEYS: Final = 100_000
_LONGEST_PAGE: Final = 10_000
_PAGE: Final = 1_000
_LONGEST_TEXT: Final = 500

_T = TypeVar("_T", bound=msgspec.Struct)


class Malformed(ApiError):  # noqa: N818  (named as `router.config` names them)
    """A body that is none of LMCache's (422)."""

    status = 422

    def openai_body(self) -> dict[str, Any]:
        """Return the body that LMCache's clients parse."""
        return {"detail": self.message}


class TooMany(Malformed):
    """A prompt with more keys than are looked at in one call (400)."""

    status = 400


class CoordinatorApi:
    """Handlers on the controller's port."""

    def __init__(
        self,
        coordinator: Coordinator,
        session: aiohttp.ClientSession,
        *,
        limit_bytes: int,
        members_changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``session`` reaches the servers; ``members_changed`` hears when one comes or goes."""
        self._coordinator = coordinator
        self._session = session
        self._limit_bytes = limit_bytes
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
        return _json(answer)

    async def heartbeat(self, request: web.Request) -> web.Response:
        """Note that a server lives; 404 has it register anew."""
        name = request.match_info["instance_id"]
        if self._coordinator.members.heartbeat(name, self._clock()):
            return _json({"instance_id": name})
        return _json({"error": f"unknown instance {name}; re-register"}, status=404)

    async def deregister(self, request: web.Request) -> web.Response:
        """Forget a server that ends, whether or not it is known."""
        self._coordinator.deregister(request.match_info["instance_id"])
        self._members_changed()
        return web.Response(status=204)

    async def usage(self, request: web.Request) -> web.Response:
        """Answer what every server holds and could hold."""
        return _json(self._coordinator.usage())

    async def usage_of_one(self, request: web.Request) -> web.Response:
        """Answer the same of one server."""
        name = request.match_info["instance_id"]
        found = self._coordinator.usage()["instances"]
        answer = next((each for each in found if each["instance_id"] == name), None)
        return _refused(404, f"unknown instance {name!r}") if answer is None else _json(answer)

    # --- events and keys

    async def events(self, request: web.Request) -> web.Response:
        """Take over servers' events."""
        call = await self._read(request, EventsCall)
        return _json(self._coordinator.apply(call.batches, self._clock()))

    async def lookup(self, request: web.Request) -> web.Response:
        """Answer where keys are, or those of a prompt's chunks."""
        call = await self._read(request, LookupCall)
        keys = [each.key() for each in call.keys]
        chunks = len(keys)
        if not keys:
            chunks, keys = self._keys(call)
        directory = self._coordinator.directory
        results = [
            _found(key, directory.get(key), directory.token_ids(key.chunk_hash)) for key in keys
        ]
        return _json({"chunks": chunks, "results": results})

    # --- what servers are told to do

    async def prefetch(self, request: web.Request) -> web.Response:
        """Pass a prefetch on to a server."""
        call = await self._read(request, PrefetchCall)
        body = msgspec.structs.asdict(call)
        name = body.pop("instance_id")
        passed = await self._pass_on("POST", name, "/cache/prefetches", body)
        if isinstance(passed, web.Response):
            return passed
        status, answer = passed
        if status >= 400:
            text = answer[:_LONGEST_TEXT].decode(errors="replace")
            return _refused(502, f"prefetch submit to {name!r} failed: {status}: {text}")
        told = orjson.loads(answer)
        return _json(
            {
                "instance_id": name,
                "request_id": told.get("request_id", ""),
                "chunks": told.get("chunks", 0),
                "status": told.get("status", "submitted"),
            }
        )

    async def prefetch_status(self, request: web.Request) -> web.Response:
        """Answer what a server says of a prefetch."""
        name, request_id = (request.match_info[each] for each in ("instance_id", "request_id"))
        passed = await self._pass_on("GET", name, f"/cache/prefetches/{request_id}", None)
        if isinstance(passed, web.Response):
            return passed
        status, answer = passed
        return web.Response(status=status, body=answer, content_type="application/json")

    async def pin(self, request: web.Request) -> web.Response:
        """Pin the keys of a prompt's chunks."""
        return await self._pin(request, self._pins.pin, "pinned")

    async def unpin(self, request: web.Request) -> web.Response:
        """End `pin`, once."""
        return await self._pin(request, self._pins.unpin, "unpinned")

    async def pins(self, request: web.Request) -> web.Response:
        """Answer a page of the pinned keys."""
        try:
            offset = _number(request, "offset", 0, 0, None)
            limit = _number(request, "limit", _PAGE, 1, _LONGEST_PAGE)
        except ValueError as error:
            return _refused(422, str(error))
        query = request.query
        salt, model = query.get("cache_salt", ""), query.get("model_name", "")
        return _json(self._pins.page(salt, model, offset, limit))

    async def healthz(self, request: web.Request) -> web.Response:
        """Answer a probe."""
        return _json({"status": "healthy"})

    # --- parts of the above

    async def _read(self, request: web.Request, kind: type[_T]) -> _T:
        body = await read_body(request, self._limit_bytes)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._coordinator.counts["malformed"] += 1
            raise Malformed(f"{request.path}: {error}") from None

    def _keys(self, call: LookupCall | TokensCall) -> tuple[int, list[ObjectKey]]:
        """Return how many chunks a prompt has, and their keys; raise `TooMany`."""
        chunk_tokens, world_size = self._coordinator.chunk_tokens, call.world_size
        if len(call.token_ids) // chunk_tokens * world_size > _MAX_KEYS:
            raise TooMany(f"the prompt has more than {_MAX_KEYS} keys")
        chain = lmcache_chain(call.token_ids, chunk_tokens)
        ranks = [rank_of_world(world_size, rank) for rank in range(world_size)]
        name, salt = call.model_name, call.cache_salt
        keys = [ObjectKey(each, name, rank, 0, salt) for each in chain for rank in ranks]
        return len(chain), keys

    async def _pass_on(
        self, method: str, name: str, path: str, body: object
    ) -> tuple[int, bytes] | web.Response:
        member = self._coordinator.members.get(name)
        if member is None:
            return _refused(404, f"no MP server registered with instance_id={name!r}")
        try:
            return await LmcacheServer(self._session, member.url).call(method, path, body)
        except AgentError as error:
            return _refused(502, f"{method} {path} at {name!r} failed: {error}")

    async def _pin(
        self, request: web.Request, act: Callable[[list[ObjectKey]], None], status: str
    ) -> web.Response:
        call = await self._read(request, TokensCall)
        chunks, keys = self._keys(call)
        act(keys)
        return _json({"requested": chunks, "affected": len(keys), "status": status})


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
    """Return a number of the query; raise ValueError for what is none, or out of range."""
    text = request.query.get(name, str(default))
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={text}: it must be a number from {least} to {most or 'any'}")
    return number


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def _refused(status: int, detail: str) -> web.Response:
    return _json({"detail": detail}, status)
