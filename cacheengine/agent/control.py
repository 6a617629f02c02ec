"""What the agent has the engine do: prefetch, pin, unpin, clear."""

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from cacheengine import wire
from cacheengine.agent.answers import BadCallError, as_json, decode, seconds
from cacheengine.agent.identity import AgentIdentity
from cacheengine.agent.prompts import Prompts, digests
from cacheengine.agent.waiting import MAX_WAIT_S, wait_for_promotion
from cacheengine.engine import CacheEngine


class Control:
    """Handlers of ``/prefetch``, ``/pin``, ``/unpin`` and ``/clear``."""

    def __init__(self, engine: CacheEngine, identity: AgentIdentity, prompts: Prompts) -> None:
        self._engine = engine
        self._identity = identity
        self._prompts = prompts

    def routes(self) -> list[web.RouteDef]:
        """Return the paths served here."""
        return [
            web.post("/prefetch", self.prefetch),
            web.post("/pin", self.pin),
            web.post("/unpin", self.unpin),
            web.post("/clear", self.clear),
        ]

    async def prefetch(self, request: web.Request) -> web.Response:
        """Promote chunks, and pin them for a while."""
        call = await decode(request, wire.PrefetchRequest)
        pin_s = seconds("pin_s", call.pin_s)
        promotion = self._engine.promote(digests(call.keys), pin_s=pin_s)
        await wait_for_promotion(promotion, min(call.wait_s, MAX_WAIT_S))
        # All counts of one moment: reads go on.
        counts = promotion.counts
        return as_json(
            wire.PrefetchReply(
                resident=counts.resident,
                promoted=counts.promoted,
                pending=counts.pending,
                missing=counts.missing,
                promoted_bytes=counts.promoted * self._identity.chunk_bytes,
            )
        )

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a prefix's chunks in a tier."""
        return await self._change_pins(request, self._engine.pin)

    async def unpin(self, request: web.Request) -> web.Response:
        """End `pin`."""
        return await self._change_pins(request, self._engine.unpin)

    async def _change_pins(
        self, request: web.Request, change: Callable[[Sequence[bytes], str], int]
    ) -> web.Response:
        call = await decode(request, wire.PinRequest)
        keys = self._prompts.some_keys_of(call)
        try:
            chunks = change(keys, call.tier)
        except ValueError as error:
            raise BadCallError(str(error)) from None
        return as_json(wire.PinReply(num_tokens=chunks * self._identity.chunk_tokens))

    async def clear(self, request: web.Request) -> web.Response:
        """Drop all chunks of some tiers, or only those named."""
        call = await decode(request, wire.ClearRequest)
        names_none = call.tokens is None and call.keys is None
        if names_none and call.cache_salt is not None:
            raise BadCallError("'cache_salt' is a prompt's: give its 'tokens' too")
        keys = None if names_none else self._prompts.some_keys_of(call)
        dropped = await asyncio.to_thread(self._engine.clear, call.tiers, keys)
        return as_json(wire.ClearReply(dropped=dropped))
