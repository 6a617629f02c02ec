"""Handlers of what the agent has done: prefetch, pin, unpin, clear, move."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from cacheengine import wire
from cacheengine.agent.answers import BadCallError, NotKnownError, as_json, decode, number, seconds
from cacheengine.agent.async_waits import MAX_WAIT_S, wait_for_event, wait_for_promotion
from cacheengine.agent.mover import Mover
from cacheengine.agent.prompts import Prompts, digests
from cacheengine.engine import CacheEngine

_LEAST_STALL_S: Final = 0.1


@dataclass(slots=True, eq=False)
class CommandHandlers:
    """``/prefetch``, ``/pin``, ``/unpin``, ``/clear``, ``/move`` and ``/moves/EVENT_ID``."""

    engine: CacheEngine
    identity: wire.ReplicaIdentity
    prompts: Prompts
    mover: Mover

    def routes(self) -> list[web.RouteDef]:
        """Return the paths served here."""
        return [
            web.post("/prefetch", self.prefetch),
            web.post("/pin", self.pin),
            web.post("/unpin", self.unpin),
            web.post("/clear", self.clear),
            web.post("/move", self.move),
            web.get("/moves/{event_id}", self.move_status),
        ]

    async def prefetch(self, request: web.Request) -> web.Response:
        """Promote chunks, and pin them for a while."""
        call = await decode(request, wire.PrefetchRequest)
        pin_s = seconds("pin_s", call.pin_s)
        promotion = self.engine.promote(digests(call.keys), pin_s=pin_s)
        await wait_for_promotion(promotion, min(call.wait_s, MAX_WAIT_S))
        # All counts of one moment: reads go on.
        counts = promotion.counts
        return as_json(
            wire.PrefetchReply(
                resident=counts.resident,
                promoted=counts.promoted,
                pending=counts.pending,
                missing=counts.missing,
                promoted_bytes=counts.promoted * self.identity.chunk_bytes,
            )
        )

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a prefix's chunks in a tier."""
        return await self._change_pins(request, self.engine.pin)

    async def unpin(self, request: web.Request) -> web.Response:
        """End `pin`."""
        return await self._change_pins(request, self.engine.unpin)

    async def _change_pins(
        self, request: web.Request, change: Callable[[Sequence[bytes], str], int]
    ) -> web.Response:
        call = await decode(request, wire.PinRequest)
        chunks = change(self.prompts.some_keys_of(call), call.tier)
        return as_json(wire.PinReply(num_tokens=chunks * self.identity.chunk_tokens))

    async def clear(self, request: web.Request) -> web.Response:
        """Drop all chunks of some tiers, or only those named."""
        call = await decode(request, wire.ClearRequest)
        names_none = call.tokens is None and call.keys is None
        if names_none and call.cache_salt is not None:
            raise BadCallError("'cache_salt' is a prompt's: give its 'tokens' too")
        keys = None if names_none else self.prompts.some_keys_of(call)
        dropped = await asyncio.to_thread(self.engine.clear, call.tiers, keys)
        return as_json(wire.ClearReply(dropped=dropped))

    async def move(self, request: web.Request) -> web.Response:
        """Begin a move into this replica."""
        call = await decode(request, wire.MoveRequest)
        seconds("pin_s", call.pin_s)
        seconds("stall_s", call.stall_s, least=_LEAST_STALL_S)
        move = await self.mover.begin(call, self.prompts.some_keys_of(call))
        num_tokens = len(move.keys) * self.identity.chunk_tokens
        return as_json(wire.MoveReply(event_id=move.event_id, num_tokens=num_tokens))

    async def move_status(self, request: web.Request) -> web.Response:
        """Say how a move goes, when it is over or after ``wait_s``."""
        move = self.mover.get(request.match_info["event_id"])
        if move is None:
            raise NotKnownError("no such move, or it is long over")
        wait_s = seconds("wait_s", number(request, "wait_s", float, default=0.0))
        await wait_for_event(move.over, min(wait_s, MAX_WAIT_S))
        return as_json(move.status())
