"""The agents of model replicas: prefetches and copies between them, at modelled rates."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from cacheengine.residency.decisions import Promotion
from replay.replica import ModelReplica
from router.agent_client import AgentError
from warmroute_common.agent_protocol import Lora, MoveReply, MoveRequest, MoveStatus, PrefetchReply

_CALL_S: Final = 0.002
"""Time that an agent takes to answer a call, without what it waits for."""
_WINDOW: Final = 4
"""Chunks that are on their way from one replica to another together."""
_LOAN_PIN_S: Final = 10.0
KV_BYTES_PER_TOKEN: Final = 131_072
"""KV of a model with 8 billion parameters, so that rates in bytes are realistic."""


class Network:
    """What replicas send each other; each sends and receives at its own rates."""

    def __init__(self) -> None:
        self._sends_until_s: dict[int, float] = {}
        self._receives_until_s: dict[int, float] = {}
        self.moved_tokens = 0

    def arrival_s(
        self, source: ModelReplica, destination: ModelReplica, tokens: int, now_s: float
    ) -> float:
        """Send the KV of this many tokens; return when it will have arrived."""
        leaves_s = max(now_s, self._sends_until_s.get(source.slot, 0.0))
        sent_s = leaves_s + tokens / source.machine.rates.peer_tokens_per_s
        comes_s = max(leaves_s, self._receives_until_s.get(destination.slot, 0.0))
        came_s = comes_s + tokens / destination.machine.rates.receive_tokens_per_s
        self._sends_until_s[source.slot] = sent_s
        self._receives_until_s[destination.slot] = came_s
        self.moved_tokens += tokens
        return max(sent_s, came_s)


class ModelAgent:
    """What a router asks of one replica's agent (`router.agent_client.StagingAgent`)."""

    def __init__(
        self, replica: ModelReplica, others: Mapping[str, ModelReplica], network: Network
    ) -> None:
        """``others``: the replicas by their agents' URLs."""
        self._replica = replica
        self._others = others
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._moves: dict[str, asyncio.Task[MoveStatus]] = {}
        self._numbers = count(1)

    async def prefetch(
        self, keys: Sequence[bytes], *, wait_s: float, pin_s: float, lora: Lora | None = None
    ) -> PrefetchReply:
        """Promote chunks; return what became of them within ``wait_s``."""
        await self._call()
        promotion = self._replica.engine.promote(keys, pin_s=pin_s)
        await settled(promotion, wait_s)
        counts = promotion.counts
        return PrefetchReply(
            resident=counts.resident,
            promoted=counts.promoted,
            pending=counts.pending,
            missing=counts.missing,
            promoted_bytes=counts.promoted * self._replica.engine.chunk_tokens * KV_BYTES_PER_TOKEN,
        )

    async def move(self, request: MoveRequest) -> MoveReply:
        """Begin to fetch chunks from another replica."""
        await self._call()
        event_id = str(next(self._numbers))
        keys = [bytes.fromhex(key) for key in request.keys or ()]
        source = self._others[request.source.agent_url]
        fetching = self._fetch(event_id, source, keys, request.pin_s)
        self._moves[event_id] = self._loop.create_task(fetching)
        tokens = len(keys) * self._replica.machine.shape.chunk_tokens
        return MoveReply(event_id=event_id, num_tokens=tokens)

    async def move_status(self, event_id: str, *, wait_s: float = 0.0) -> MoveStatus:
        """Return how a move goes, at its end or after ``wait_s``."""
        task = self._moves[event_id]
        await asyncio.wait({task}, timeout=wait_s)
        if task.done():
            return self._moves.pop(event_id).result()
        return MoveStatus(
            event_id=event_id, state="running", asked_chunks=0, arrived_chunks=0, moved_bytes=0
        )

    async def _call(self) -> None:
        await asyncio.sleep(_CALL_S)
        if not self._replica.is_alive:
            raise AgentError("nobody listens there")

    async def _fetch(
        self, event_id: str, source: ModelReplica, keys: Sequence[bytes], pin_s: float
    ) -> MoveStatus:
        """Get chunks a window after the other, and keep each until all have come."""
        engine = self._replica.engine
        left = list(keys[len(engine.match(keys)) :])
        held: list[bytes] = []
        moved = 0
        error = ""
        while left and not error:
            window, left = left[:_WINDOW], left[_WINDOW:]
            reservation = engine.prepare_store(window)
            if reservation is None:
                error = "no room"
            elif reservation.keys:
                came = await self._receive(source, reservation.keys)
                engine.complete_store(reservation.keys, success=came, prefetched=True)
                error = "" if came else "the source does not have all of it any more"
                if came:
                    held += engine_held(self._replica, reservation.keys)
                    moved += len(reservation.keys)
        promotion = engine.promote(keys, pin_s=pin_s)
        await settled(promotion, pin_s)
        arrived = len(engine.match(keys))
        engine.release(held)
        return MoveStatus(
            event_id=event_id,
            state="failed" if arrived < len(keys) else "done",
            asked_chunks=len(keys),
            arrived_chunks=arrived,
            moved_bytes=moved * self._replica.machine.shape.chunk_tokens * KV_BYTES_PER_TOKEN,
            error=error if arrived < len(keys) else "",
        )

    async def _receive(self, source: ModelReplica, keys: Sequence[bytes]) -> bool:
        """Wait until chunks have come; return whether the source has them all."""
        if not source.is_alive:
            return False
        if any(tier != "cpu" for tier in source.engine.match(keys)):
            await settled(source.engine.promote(keys, pin_s=_LOAN_PIN_S), _LOAN_PIN_S)
        lent = engine_held(source, keys)
        try:
            if len(lent) < len(keys):
                return False
            tokens = len(keys) * source.machine.shape.chunk_tokens
            now_s = self._loop.time()
            came_s = self._network.arrival_s(source, self._replica, tokens, now_s)
            await asyncio.sleep(came_s - now_s)
            return source.is_alive and self._replica.is_alive
        finally:
            source.engine.release(lent)


def engine_held(replica: ModelReplica, keys: Sequence[bytes]) -> list[bytes]:
    """Hold those chunks that are in a replica's CPU RAM; return them."""
    return [key for key in keys if replica.engine.try_hold(key) is not None]


async def settled(promotion: Promotion, wait_s: float) -> None:
    """Wait until a promotion is over, ``wait_s`` at most."""
    if promotion.done or wait_s <= 0:
        return
    over = asyncio.Event()
    promotion.add_done_callback(over.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await over.wait()
