"""vLLM's `OffloadingManager` over the cache engine: the scheduler's side of KV offloading.

vLLM's scheduler looks up chunks, reserves rows for chunks to store, and reports finished copies.
All of it runs on the scheduler's thread.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

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

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.promotion_waits import PromotionWaits
from cacheengine.identity.kv_versions import KvVersion, KvVersions, LoraAdapter
from cacheengine.record import CPU
from cacheengine.residency.decisions import Presence

_MAX_BACKOFF_OFFERS: Final = 16
"""Most offers that are skipped in a row. vLLM makes one per step; asking the engine costs time."""


@dataclass(slots=True)
class _Backoff:
    offers: int = 0
    left: int = 0


class RefusedStores:
    """The first chunk of each request that found no space, and when to try it again. Pure.

    vLLM offers each chunk only once, so `WarmrouteConnector` has it offer these again. While the
    pool takes none of a request's chunks, the number of skipped offers doubles.
    """

    def __init__(self) -> None:
        self._backoffs: dict[str, _Backoff] = {}
        self._refused: dict[str, OffloadKey] = {}

    def skip(self, req_id: str, first: OffloadKey) -> bool:
        """Return whether to skip an offer that begins with this chunk; it is then refused."""
        backoff = self._backoffs.get(req_id)
        if backoff is None or not backoff.left:
            return False
        backoff.left -= 1
        self._refused[req_id] = first
        return True

    def refuse(self, req_id: str, first: OffloadKey, *, took_some: bool) -> None:
        """Note that an offer's chunks from ``first`` on found no space."""
        backoff = self._backoffs.setdefault(req_id, _Backoff())
        backoff.offers = 0 if took_some else min(2 * backoff.offers + 1, _MAX_BACKOFF_OFFERS)
        backoff.left = backoff.offers
        self._refused[req_id] = first

    def end(self, req_id: str) -> None:
        """Forget a request: all its offered chunks are stored, or it has ended."""
        self._backoffs.pop(req_id, None)
        self._refused.pop(req_id, None)

    def end_backoff(self, req_ids: Iterable[str]) -> None:
        """Skip none of the next offers of these requests: they are their last."""
        for req_id in req_ids:
            self._backoffs.pop(req_id, None)

    def take_refused(self) -> dict[str, OffloadKey]:
        """Return the first chunk of each request that was refused since the last call."""
        refused, self._refused = self._refused, {}
        return refused

    def clear(self) -> None:
        self._backoffs.clear()
        self._refused.clear()


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights that compute a request's KV; they stay the same until the request ends."""

    adapter: LoraAdapter | None
    version: KvVersion


_LOADED_AT_START = _Weights(None, KvVersion())


class RequestKeys:
    """Translates vLLM's block hashes into the engine's keys, which also name the weights."""

    def __init__(self, versions: KvVersions) -> None:
        self.versions = versions
        self._arriving: dict[str, LoraAdapter | None] = {}

    def expect(self, req_id: str, adapter: LoraAdapter | None) -> None:
        """Note the adapter of a request that is about to `begin`."""
        self._arriving[req_id] = adapter

    def begin(self, req_context: ReqContext) -> None:
        """Note the weights that compute a new request's KV."""
        adapter = self._arriving.pop(req_context.req_id, None)
        req_context.set_state(_Weights(adapter, self.versions.of_request(adapter)))

    def may_load(self, req_context: ReqContext) -> bool:
        """Whether chunks of the request's weights may be loaded."""
        version = _weights(req_context).version
        return version.is_cached and version.epoch == self.versions.epoch

    def may_store(self, req_context: ReqContext) -> bool:
        """Whether vLLM computes the request's KV now with the weights that its keys name."""
        weights = _weights(req_context)
        return self.versions.is_current(weights.version, weights.adapter)

    def stored_key(self, key: OffloadKey, req_context: ReqContext) -> bytes:
        return _weights(req_context).version.stored_key(get_offload_block_hash(key))

    def stored(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[bytes]:
        stored_key = _weights(req_context).version.stored_key
        return [stored_key(get_offload_block_hash(key)) for key in keys]


def _weights(req_context: ReqContext) -> _Weights:
    return req_context.get_state(_Weights) or _LOADED_AT_START


class ChunkStores:
    """Reserves rows of the pool for chunks that are copied from the GPU."""

    def __init__(self, engine: CacheEngine, keys: RequestKeys, group_idx: int) -> None:
        self._engine = engine
        self._keys = keys
        self._group_idx = group_idx
        self._in_progress: set[bytes] = set()
        self.refused = RefusedStores()

    def prepare(
        self, offered: Mapping[bytes, OffloadKey], context: ReqContext, prefix: Collection[bytes]
    ) -> PrepareStoreOutput:
        """Reserve rows, as `WarmrouteManager.prepare_store` describes.

        ``offered`` maps the chunks' keys, in prefix order, to vLLM's keys. ``prefix`` holds chunks
        of the same request that were offered or loaded before.
        """
        first = next(iter(offered.values()))
        if self.refused.skip(context.req_id, first):
            return self.none()
        reservation = self._engine.prepare_store(list(offered), prefix=prefix)
        if reservation is None:
            self.refused.refuse(context.req_id, first, took_some=False)
            return self.none()
        if reservation.refused:
            self.refused.refuse(context.req_id, offered[reservation.refused[0]], took_some=True)
        else:
            self.refused.end(context.req_id)
        self._in_progress.update(reservation.keys)
        return PrepareStoreOutput(
            keys_to_store=[offered[chunk] for chunk in reservation.keys],
            store_spec=CPULoadStoreSpec(list(reservation.slots)),
            evicted_keys=[make_offload_key(key, self._group_idx) for key in reservation.evicted],
        )

    def none(self) -> PrepareStoreOutput:
        return PrepareStoreOutput([], CPULoadStoreSpec([]), [])

    def complete(self, keys: Collection[OffloadKey], context: ReqContext, *, success: bool) -> None:
        """Make stored chunks visible, or give their rows back."""
        # vLLM keeps a job's keys in a set. The engine needs prefix order: it writes the beginning
        # of a prefix first and evicts from its end.
        in_order = sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
        chunks = self._keys.stored(in_order, context)
        self._in_progress.difference_update(chunks)
        self._engine.complete_store(chunks, success=success)

    def take_in_progress(self) -> list[bytes]:
        """Return the chunks whose stores are in progress, and forget them and the refused ones."""
        in_progress = list(self._in_progress)
        self._in_progress.clear()
        self.refused.clear()
        return in_progress


# vLLM distinguishes a remote store from a local one by its locality.
_MEDIUM_BY_TIER: Final = {
    "cpu": (Medium.CPU, Locality.LOCAL),
    "disk": (Medium.STORAGE, Locality.LOCAL),
    "remote": (Medium.STORAGE, Locality.REMOTE),
}

_SOURCE_BY_TIER: Final = {
    CPU: CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "remote": CacheHitSource.EXTERNAL_UNSPECIFIED,
}

# vLLM forgets its transfers in reset_cache(), and its workers finish them in the next step. Until
# then the rows must not be reused. vLLM 0.33 reports that moment (`on_reset_flushed`). vLLM 0.32
# does not: `WarmrouteManager.expect_batches`.
_REPORTS_FLUSH = hasattr(OffloadingManager, "on_reset_flushed")
_LEAST_STEPS_UNTIL_FLUSHED: Final = 3


@dataclass(slots=True)
class _UnfinishedTransfers:
    """Transfers that were in progress at a reset: each load's chunks, once per hold, and stores."""

    loads: list[bytes]
    stores: list[bytes]
    steps_left: int


_STEPS_LOOKED_UP: Final = 16
"""Steps after which a prompt that waits for room in the GPU is looked up again."""
_MOST_KEPT_SHARE: Final = 0.25
"""A prompt that takes more of the pool is looked up in each step, so that it keeps no slots."""


@dataclass(slots=True)
class _Lookup:
    """What the lookups of a prompt found that vLLM can load, but has no room for yet."""

    asked: tuple[object, ...]
    matched: tuple[int | None, bool]
    chunks: set[bytes]
    steps_left: int = _STEPS_LOOKED_UP
    is_asked: bool = True
    """vLLM has asked for it in this step."""


class WarmrouteManager(OffloadingManager):  # type: ignore[misc]
    """vLLM's interface over a `CacheEngine`: translates keys, and holds one step's hits.

    vLLM calls `lookup`, then `prepare_load`; in between the engine's I/O threads could evict the
    chunk. So a hit is held from its lookup until the scheduler's step ends, and `prepare_load`
    takes its own holds.
    """

    def __init__(
        self,
        engine: CacheEngine,
        group_idx: int,
        *,
        enable_events: bool,
        on_shutdown: Callable[[], None],
        versions: KvVersions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.keys = RequestKeys(versions or KvVersions())
        self.engine = engine
        self._group_idx = group_idx
        self._enable_events = enable_events
        self._on_shutdown = on_shutdown
        self._step_holds: set[bytes] = set()
        # By request. Their chunks stay in `_step_holds`.
        self._lookups: dict[str, _Lookup] = {}
        self.waits = PromotionWaits(engine, clock)
        # Chunks whose use the eviction policy has counted, by request.
        self._used: defaultdict[str, set[bytes]] = defaultdict(set)
        self._loads: Counter[bytes] = Counter()
        self.stores = ChunkStores(engine, self.keys, group_idx)
        self._flushing: deque[_UnfinishedTransfers] = deque()
        self._steps_until_flushed = _LEAST_STEPS_UNTIL_FLUSHED

    def expect_batches(self, most: int) -> None:
        """Note how many steps vLLM schedules before the first of them has ended.

        The step after these is scheduled when the first one after a reset, in which workers finish
        their transfers, has ended.
        """
        self._steps_until_flushed = max(_LEAST_STEPS_UNTIL_FLUSHED, most + 1)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.keys.begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.stores.refused.end(req_context.req_id)
        self._lookups.pop(req_context.req_id, None)
        self.waits.end(req_context.req_id)
        self._used.pop(req_context.req_id, None)

    def looked_up(self, req_id: str, asked: tuple[object, ...]) -> tuple[int | None, bool] | None:
        """Return what the lookups of a prompt have found; None if it must be looked up.

        vLLM asks again in each step until the prompt has room in the GPU. ``asked`` is equal if the
        lookups would be the same, but for chunks that have come since.
        """
        found = self._lookups.get(req_id)
        if found is None or found.asked != asked or found.steps_left == 0:
            self._lookups.pop(req_id, None)
            return None
        found.steps_left -= 1
        found.is_asked = True
        return found.matched

    def note_lookup(
        self, req_id: str, asked: tuple[object, ...], matched: tuple[int | None, bool]
    ) -> None:
        """Note what the lookups of a prompt have found; until it is loaded its chunks are held."""
        chunks = {*self.waits.found_for(req_id)}
        if matched[0] and len(chunks) <= _MOST_KEPT_SHARE * self.engine.slots:
            self._lookups[req_id] = _Lookup(asked, matched, chunks)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk can be loaded; request its promotion from a lower tier.

        Also returns RETRY for a chunk that may be in the remote tier: vLLM looks up all chunks of a
        prompt before it retries, so the remote tier gets them in one query.
        """
        if not self.keys.may_load(req_context):
            return LookupResult.MISS
        chunk = self.keys.stored_key(key, req_context)
        if chunk not in self._step_holds and self.engine.try_hold(chunk) is not None:
            self._step_holds.add(chunk)
        if chunk in self._step_holds:
            self.waits.found(req_context.req_id, chunk)
            return LookupResult.HIT
        match self.engine.lookup(chunk):
            case Presence.MISS:
                return LookupResult.MISS
            case Presence.DISK:
                return self._want(key, "disk", chunk, req_context)
            case Presence.REMOTE | Presence.UNKNOWN:
                return self._want(key, "remote", chunk, req_context)
            case Presence.PENDING | Presence.CPU:
                # CPU: the chunk became ready after try_hold; the next step holds it.
                return self._want(key, None, chunk, req_context)

    def _want(
        self, key: OffloadKey, tier: str | None, chunk: bytes, req_context: ReqContext
    ) -> LookupResult:
        """Request a promotion at the end of the step, if the request may load from that tier."""
        if tier and not req_context.load_tier_filter.allows(*_MEDIUM_BY_TIER[tier]):
            return LookupResult.MISS
        position = req_context.get_offload_key_position(key) or 0
        if not self.waits.want(req_context.req_id, chunk, tier, position):
            return LookupResult.MISS
        return LookupResult.RETRY if tier else LookupResult.HIT_PENDING

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier in which this request found a chunk that it loads."""
        tier = self.waits.tier_of(req_context.req_id, self.keys.stored_key(key, req_context))
        return _SOURCE_BY_TIER[tier or CPU]

    def _note_use(self, chunks: list[bytes], req_context: ReqContext) -> None:
        """Count a use for the eviction policy, once per request and chunk.

        Otherwise a chunk that one request loads and offers several times (after a preemption, or
        because the pool was full) would count as used often.
        """
        used = self._used[req_context.req_id]
        self.engine.touch([chunk for chunk in chunks if chunk not in used])
        used.update(chunks)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hold chunks that `lookup` found, until `complete_load`; they count as used."""
        chunks = self.keys.stored(keys, req_context)
        # The step holds them since `lookup`; the agent's thread may have cleared them meanwhile.
        slots = self.engine.hold(chunks, held_before=True, holder=req_context.req_id)
        self._lookups.pop(req_context.req_id, None)
        # vLLM's scheduler never calls touch().
        self._note_use(chunks, req_context)
        self._loads.update(chunks)
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release chunks whose copy to the GPU has ended."""
        chunks = self.keys.stored(keys, req_context)
        self._loads -= Counter(chunks)
        self.engine.release(chunks)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve rows for the chunks that are not stored yet, as far as the pool has space.

        The others are remembered, and `WarmrouteConnector` has vLLM offer them again. Chunks that
        are stored already count as used: a prefix on the GPU is never loaded, but each request
        offers it.
        """
        if not self.keys.may_store(req_context):
            return self.stores.none()
        offered = dict(zip(self.keys.stored(keys, req_context), keys, strict=True))
        self._note_use(list(offered), req_context)
        return self.stores.prepare(offered, req_context, self._used[req_context.req_id])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.stores.complete(keys, req_context, success=success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start the promotions that this step's lookups requested; release the step's holds."""
        self.waits.end_step()
        self._release_step_holds()
        if not _REPORTS_FLUSH:
            self._count_down_to_flushed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield the tiers' stored and removed chunks, for vLLM's KV event stream."""
        events = self.engine.take_events()
        if not self._enable_events:
            return
        for event in events:
            medium, locality = _MEDIUM_BY_TIER[event.tier]
            yield OffloadingEvent(
                keys=[make_offload_key(chunk, self._group_idx) for chunk in event.keys],
                medium=medium,
                removed=not event.stored,
                locality=locality,
            )

    def reset_cache(self) -> None:
        """Empty the pool; the rows of transfers in progress follow when these have ended."""
        loads = list(self._loads.elements())
        stores = self.stores.take_in_progress()
        self._flushing.append(_UnfinishedTransfers(loads, stores, self._steps_until_flushed))
        self._loads.clear()
        self.waits.clear()
        self._used.clear()
        self._lookups.clear()
        self._release_step_holds()
        # The lower tiers stay: vLLM calls this to pause and to sleep, which changes no weights.
        self.engine.clear([CPU])

    def weights_changed(self) -> None:
        """Begin a new epoch: chunks of earlier weights are neither found nor stored any more."""
        self.keys.versions.weights_changed()
        self._lookups.clear()
        self.engine.clear(keep_shared=True)

    def _release_step_holds(self) -> None:
        self._lookups = {name: each for name, each in self._lookups.items() if each.is_asked}
        kept: set[bytes] = set()
        for found in self._lookups.values():
            found.is_asked = False
            kept |= found.chunks
        released = self._step_holds - kept
        if released:
            self.engine.release(list(released))
            self._step_holds -= released

    def shutdown(self) -> None:
        """Stop the agent and the engine's threads, and free the memory."""
        self._on_shutdown()

    def on_reset_flushed(self) -> None:
        """Free the rows of all transfers that were in progress at `reset_cache`."""
        while self._flushing:
            self._release_flushed(self._flushing.popleft())

    def _count_down_to_flushed(self) -> None:
        for transfers in self._flushing:
            transfers.steps_left -= 1
        while self._flushing and self._flushing[0].steps_left <= 0:
            self._release_flushed(self._flushing.popleft())

    def _release_flushed(self, transfers: _UnfinishedTransfers) -> None:
        self.engine.release(transfers.loads)
        self.engine.complete_store(transfers.stores, success=False)
