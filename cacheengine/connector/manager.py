"""The scheduler's view of the engine, as vLLM's offloading interface wants it."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cacheengine.engine import CacheEngine, Presence

_MEDIUM_BY_TIER = {"cpu": Medium.CPU, "disk": Medium.STORAGE}

# How long chunks promoted for a waiting request stay pinned if it never comes
# back for them (it was aborted).
_LOOKUP_PIN_S = 10.0

# vLLM forgets its transfers in reset_cache() and tells its workers to finish
# them in the step after. Until they have, the rows must not be given to anyone
# else. vLLM 0.33 says when that is so (`on_reset_flushed`); 0.32 does not: there
# it is one step later, with asynchronous scheduling two.
_TELLS_WHEN_FLUSHED = hasattr(OffloadingManager, "on_reset_flushed")
_STEPS_UNTIL_FLUSHED = 3


@dataclass(slots=True)
class _UnderWay:
    """Transfers that a reset found under way: chunks by how often they are held, and stores."""

    loads: list[bytes]
    stores: list[bytes]
    steps_left: int = _STEPS_UNTIL_FLUSHED


class WarmrouteManager(OffloadingManager):  # type: ignore[misc]
    """A thin face of `CacheEngine`: translates keys, keeps what one step holds.

    vLLM asks in two steps, `lookup` then `prepare_load`, and between them the
    engine's I/O threads may want the room. So a hit is held from the lookup
    until the scheduler's step ends; `prepare_load` takes holds of its own.
    """

    def __init__(
        self,
        engine: CacheEngine,
        group_idx: int,
        *,
        enable_events: bool,
        on_shutdown: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._group_idx = group_idx
        self._enable_events = enable_events
        self._on_shutdown = on_shutdown
        self._step_holds: set[bytes] = set()
        self._promoted: dict[str, set[bytes]] = {}
        self._loads: dict[bytes, int] = {}
        self._stores: set[bytes] = set()
        self._flushing: deque[_UnderWay] = deque()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is remembered of a request before its first lookup."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget where the request's hits came from."""
        self._promoted.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk can be loaded; start its promotion if it is below the CPU tier."""
        chunk = get_offload_block_hash(key)
        if chunk in self._step_holds:
            return LookupResult.HIT
        if self._engine.try_hold(chunk) is not None:
            self._step_holds.add(chunk)
            return LookupResult.HIT
        match self._engine.lookup(chunk):
            case Presence.MISS:
                return LookupResult.MISS
            case Presence.DISK:
                return self._promote(chunk, req_context)
            case Presence.PENDING | Presence.CPU:
                # CPU: it became ready since try_hold; the next step holds it.
                return LookupResult.HIT_PENDING

    def _promote(self, chunk: bytes, req_context: ReqContext) -> LookupResult:
        promotion = self._engine.promote([chunk], pin_s=_LOOKUP_PIN_S)
        if promotion.missing:
            return LookupResult.MISS
        self._promoted.setdefault(req_context.req_id, set()).add(chunk)
        return LookupResult.RETRY

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier where this request found a chunk it loads."""
        promoted = self._promoted.get(req_context.req_id, ())
        if get_offload_block_hash(key) in promoted:
            return CacheHitSource.DISK
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hold chunks that `lookup` found, until `complete_load`; they count as used."""
        chunks = [get_offload_block_hash(key) for key in keys]
        # The step holds them since `lookup`; the agent's thread may have
        # cleared them in between.
        slots = self._engine.hold(chunks, held_before=True)
        # vLLM's scheduler never calls touch().
        self._engine.touch(chunks)
        for chunk in chunks:
            self._loads[chunk] = self._loads.get(chunk, 0) + 1
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release chunks whose copy to the GPU has ended."""
        chunks = [get_offload_block_hash(key) for key in keys]
        for chunk in chunks:
            if self._loads[chunk] == 1:
                del self._loads[chunk]
            else:
                self._loads[chunk] -= 1
        self._engine.release(chunks)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as recently used."""
        self._engine.touch([get_offload_block_hash(key) for key in keys])

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve rows for the chunks that are not there yet; None when there is no room.

        Those that are there count as used: a prefix that the GPU holds is
        never loaded, but offered again by each request.
        """
        chunks = [get_offload_block_hash(key) for key in keys]
        self._engine.touch(chunks)
        reservation = self._engine.prepare_store(chunks)
        if reservation is None:
            return None
        self._stores.update(reservation.keys)
        return PrepareStoreOutput(
            keys_to_store=self._offload_keys(reservation.keys),
            store_spec=CPULoadStoreSpec(list(reservation.slots)),
            evicted_keys=self._offload_keys(reservation.evicted),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored chunks visible, or give their rows back."""
        # vLLM keeps a job's keys in a set; the engine wants prefix order, to
        # write the beginning first and to evict from the end.
        in_order = sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)
        chunks = [get_offload_block_hash(key) for key in in_order]
        self._stores.difference_update(chunks)
        self._engine.complete_store(chunks, success=success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Let go of what this step's lookups held."""
        if self._step_holds:
            self._engine.release(list(self._step_holds))
            self._step_holds.clear()
        if not _TELLS_WHEN_FLUSHED:
            self._count_down_to_flushed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield what the tiers gained and lost, for vLLM's KV event stream."""
        events = self._engine.take_events()
        if not self._enable_events:
            return
        for event in events:
            medium = _MEDIUM_BY_TIER.get(event.tier)
            if medium is not None:
                yield OffloadingEvent(
                    keys=self._offload_keys(event.keys),
                    medium=medium,
                    removed=not event.stored,
                    locality=Locality.LOCAL,
                )

    def reset_cache(self) -> None:
        """Drop every chunk; rows of transfers under way follow when those have ended."""
        loads = [chunk for chunk, count in self._loads.items() for _ in range(count)]
        self._flushing.append(_UnderWay(loads, list(self._stores)))
        self._loads.clear()
        self._stores.clear()
        self._promoted.clear()
        if self._step_holds:
            self._engine.release(list(self._step_holds))
            self._step_holds.clear()
        self._engine.clear()

    def shutdown(self) -> None:
        """Stop the agent, the engine's threads, and give the memory back."""
        self._on_shutdown()

    def on_reset_flushed(self) -> None:
        """Give back the rows of all transfers that `reset_cache` found under way."""
        while self._flushing:
            self._release_flushed(self._flushing.popleft())

    def _count_down_to_flushed(self) -> None:
        for under_way in self._flushing:
            under_way.steps_left -= 1
        while self._flushing and self._flushing[0].steps_left <= 0:
            self._release_flushed(self._flushing.popleft())

    def _release_flushed(self, under_way: "_UnderWay") -> None:
        self._engine.release(under_way.loads)
        self._engine.complete_store(under_way.stores, success=False)

    def _offload_keys(self, chunks: Iterable[bytes]) -> list[OffloadKey]:
        return [make_offload_key(chunk, self._group_idx) for chunk in chunks]
