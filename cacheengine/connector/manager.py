"""How fast the model computes prompts, seen from the scheduler's steps. Pure."""

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

from cacheengine.engine import CacheEngine, PromotionWaits
from cacheengine.identity import KvVersion, KvVersions, LoraAdapter
from cacheengine.record import CPU
from cacheengine.residency import Presence

_LEAST_TOKENS: Final = 64
"""Steps of fewer prompt tokens say more of decoding."""
_NEW_SHARE: Final = 0.2


class ComputeRate:
    """Prompt tokens computed in a second, recent steps counting more."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._began_s: float | None = None
        self._before_s = 0.0
        self._tokens = 0

    def begin_step(self, prompt_tokens: int, now_s: float) -> None:
        """Note that a step begins, in which so many prompt tokens are computed."""
        if self._began_s is not None:
            took_s = now_s - self._began_s
            # With asynchronous scheduling a step begins while the one before still runs, and
            # its own time may fall into the next interval: the longer of two.
            if self._tokens >= _LEAST_TOKENS and max(took_s, self._before_s) > 0:
                self._learn(self._tokens / max(took_s, self._before_s))
            self._before_s = took_s
        self._began_s = now_s
        self._tokens = prompt_tokens

    def _learn(self, tokens_per_s: float) -> None:
        share = _NEW_SHARE if self._tokens_per_s else 1.0
        self._tokens_per_s += share * (tokens_per_s - self._tokens_per_s)

    def seconds(self, tokens: int) -> float:
        """Return how long so many tokens take; for ever while no prompt was computed."""
        return tokens / self._tokens_per_s if self._tokens_per_s else float("inf")


# TODO of cacheengine.connector.manager: Chunks that a request offered and that found no room, until they are offered again. Pure.
#
# vLLM offers each chunk of a request once: what a partial reservation leaves out
# it passes over. `connector` sets it back to the first of them.

_LONGEST_PAUSE: Final = 16
"""Offers passed over at most: one comes with each step, and asking the engine costs time."""


@dataclass(slots=True)
class _Pause:
    offers: int = 0
    left: int = 0


class RefusedStores:
    """For each request the first chunk that was refused, and when it is taken up again.

    While nothing of a request is taken, twice as many of its offers are passed
    over each time.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}
        self._news: dict[str, OffloadKey] = {}

    def pass_over(self, req_id: str, first: OffloadKey) -> bool:
        """Whether an offer that begins with this chunk is too early; it is then refused."""
        pause = self._pauses.get(req_id)
        if pause is None or not pause.left:
            return False
        pause.left -= 1
        self._news[req_id] = first
        return True

    def refuse(self, req_id: str, first: OffloadKey, *, took_some: bool) -> None:
        """Note that of an offer the chunks from this one on found no room."""
        pause = self._pauses.setdefault(req_id, _Pause())
        pause.offers = 0 if took_some else min(2 * pause.offers + 1, _LONGEST_PAUSE)
        pause.left = pause.offers
        self._news[req_id] = first

    def end(self, req_id: str) -> None:
        """Note that all that was offered is taken or there, or that the request has ended."""
        self._pauses.pop(req_id, None)
        self._news.pop(req_id, None)

    def hurry(self, req_ids: Iterable[str]) -> None:
        """Let the next offers of these requests count: they are the last."""
        for req_id in req_ids:
            self._pauses.pop(req_id, None)

    def take_news(self) -> dict[str, OffloadKey]:
        """Return, by request, the first chunk refused since the last call."""
        news, self._news = self._news, {}
        return news

    def clear(self) -> None:
        """Forget all requests."""
        self._pauses.clear()
        self._news.clear()


# TODO of cacheengine.connector.manager: The keys of a request's chunks: vLLM's, and in them which weights make its KV.


@dataclass(frozen=True, slots=True)
class _Weights:
    """Which weights make a request's KV; for all its life."""

    adapter: LoraAdapter | None
    version: KvVersion


_LOADED_AT_START = _Weights(None, KvVersion())


class RequestKeys:
    """Each request's keys in the engine, from vLLM's, and whether they may be used now."""

    def __init__(self, versions: KvVersions) -> None:
        self.versions = versions
        self._arriving: dict[str, LoraAdapter | None] = {}

    def expect(self, req_id: str, adapter: LoraAdapter | None) -> None:
        """Note which adapter a request uses that is about to `begin`."""
        self._arriving[req_id] = adapter

    def begin(self, req_context: ReqContext) -> None:
        """Note which weights make the KV of a new request."""
        adapter = self._arriving.pop(req_context.req_id, None)
        req_context.set_state(_Weights(adapter, self.versions.of_request(adapter)))

    def may_load(self, req_context: ReqContext) -> bool:
        """Whether chunks of its weights may be found."""
        version = _weights(req_context).version
        return version.is_cached and version.epoch == self.versions.epoch

    def may_store(self, req_context: ReqContext) -> bool:
        """Whether what vLLM computes for it now is of the weights that its keys say."""
        weights = _weights(req_context)
        return self.versions.is_current(weights.version, weights.adapter)

    def stored_key(self, key: OffloadKey, req_context: ReqContext) -> bytes:
        """Return the key of one of its chunks."""
        return _weights(req_context).version.stored_key(get_offload_block_hash(key))

    def stored(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[bytes]:
        """Return the keys of some of its chunks."""
        stored_key = _weights(req_context).version.stored_key
        return [stored_key(get_offload_block_hash(key)) for key in keys]


def _weights(req_context: ReqContext) -> _Weights:
    return req_context.get_state(_Weights) or _LOADED_AT_START


# TODO of cacheengine.connector.manager: Chunks on their way from the GPU into the pool, as vLLM's scheduler asks for them.


class ChunkStores:
    """Reservations of the engine's for the scheduler, and what is remembered of refused ones."""

    def __init__(self, engine: CacheEngine, keys: RequestKeys, group_idx: int) -> None:
        self._engine = engine
        self._keys = keys
        self._group_idx = group_idx
        self._under_way: set[bytes] = set()
        self.offers = RefusedStores()

    def prepare(
        self, offered: Mapping[bytes, OffloadKey], context: ReqContext, prefix: Collection[bytes]
    ) -> PrepareStoreOutput:
        """Reserve rows as `WarmrouteManager.prepare_store` says.

        ``offered`` are the chunks in order, with vLLM's keys of them; ``prefix`` are chunks of the
        same request that were offered or loaded before.
        """
        first = next(iter(offered.values()))
        if self.offers.pass_over(context.req_id, first):
            return self.none()
        reservation = self._engine.prepare_store(list(offered), prefix=prefix)
        if reservation is None:
            self.offers.refuse(context.req_id, first, took_some=False)
            return self.none()
        if reservation.refused:
            self.offers.refuse(context.req_id, offered[reservation.refused[0]], took_some=True)
        else:
            self.offers.end(context.req_id)
        self._under_way.update(reservation.keys)
        return PrepareStoreOutput(
            keys_to_store=[offered[chunk] for chunk in reservation.keys],
            store_spec=CPULoadStoreSpec(list(reservation.slots)),
            evicted_keys=[make_offload_key(key, self._group_idx) for key in reservation.evicted],
        )

    def none(self) -> PrepareStoreOutput:
        """Return that nothing is taken."""
        return PrepareStoreOutput([], CPULoadStoreSpec([]), [])

    def complete(self, keys: Collection[OffloadKey], context: ReqContext, *, success: bool) -> None:
        """Make stored chunks visible, or give their rows back."""
        # vLLM keeps a job's keys in a set; the engine wants prefix order, to
        # write the beginning first and to evict from the end.
        in_order = sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
        chunks = self._keys.stored(in_order, context)
        self._under_way.difference_update(chunks)
        self._engine.complete_store(chunks, success=success)

    def take_under_way(self) -> list[bytes]:
        """Return what is under way and forget it; forget what was refused, too."""
        under_way = list(self._under_way)
        self._under_way.clear()
        self.offers.clear()
        return under_way


# TODO of cacheengine.connector.manager: The scheduler's view of the engine, as vLLM's offloading interface wants it.

# vLLM tells a remote store from a local one by its locality.
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

# vLLM forgets its transfers in reset_cache() and tells its workers to finish
# them in the step after. Until they have, the rows must not be reused. vLLM
# 0.33 says when that is so (`on_reset_flushed`); 0.32 does not: there it is one
# step later, with asynchronous scheduling two.
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
        versions: KvVersions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.keys = RequestKeys(versions or KvVersions())
        self._engine = engine
        self._group_idx = group_idx
        self._enable_events = enable_events
        self._on_shutdown = on_shutdown
        self._step_holds: set[bytes] = set()
        self.waits = PromotionWaits(engine, clock)
        # Chunks whose use was noted, by request.
        self._used: defaultdict[str, set[bytes]] = defaultdict(set)
        self._loads: Counter[bytes] = Counter()
        self.stores = ChunkStores(engine, self.keys, group_idx)
        self._flushing: deque[_UnderWay] = deque()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note which weights make its KV; nothing else before its first lookup."""
        self.keys.begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was remembered of the request."""
        self.stores.offers.end(req_context.req_id)
        self.waits.end(req_context.req_id)
        self._used.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk can be loaded; have it promoted if it is below the CPU tier.

        RETRY for a chunk that the remote tier is asked for, too: vLLM looks up
        all chunks of a prompt before it comes again, so they go in one question.
        """
        if not self.keys.may_load(req_context):
            return LookupResult.MISS
        chunk = self.keys.stored_key(key, req_context)
        if self._hold(chunk):
            self.waits.found(req_context.req_id, chunk)
            return LookupResult.HIT
        match self._engine.lookup(chunk):
            case Presence.MISS:
                return LookupResult.MISS
            case Presence.DISK:
                return self._want(key, "disk", chunk, req_context)
            case Presence.REMOTE | Presence.UNKNOWN:
                return self._want(key, "remote", chunk, req_context)
            case Presence.PENDING | Presence.CPU:
                # CPU: it became ready since try_hold; the next step holds it.
                waits = self.waits.wait_for(req_context.req_id, chunk)
                return LookupResult.HIT_PENDING if waits else LookupResult.MISS

    def _hold(self, chunk: bytes) -> bool:
        """Hold a chunk until the step's end, if it is ready."""
        if chunk not in self._step_holds and self._engine.try_hold(chunk) is not None:
            self._step_holds.add(chunk)
        return chunk in self._step_holds

    def _want(
        self, key: OffloadKey, tier: str, chunk: bytes, req_context: ReqContext
    ) -> LookupResult:
        """Have a chunk promoted at the step's end, unless the request does not load from there."""
        if not req_context.load_tier_filter.allows(*_MEDIUM_BY_TIER[tier]):
            return LookupResult.MISS
        position = req_context.get_offload_key_position(key) or 0
        waits = self.waits.want(req_context.req_id, chunk, tier, position)
        return LookupResult.RETRY if waits else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier where this request found a chunk it loads."""
        tier = self.waits.tier_of(req_context.req_id, self.keys.stored_key(key, req_context))
        return _SOURCE_BY_TIER[tier or CPU]

    def _note_use(self, chunks: list[bytes], req_context: ReqContext) -> None:
        """Tell the eviction of a use, once for each request and chunk.

        Else a chunk that one request loads and offers again (after a
        preemption, or because there was no room) would count as used often.
        """
        used = self._used[req_context.req_id]
        self._engine.touch([chunk for chunk in chunks if chunk not in used])
        used.update(chunks)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hold chunks that `lookup` found, until `complete_load`; they count as used."""
        chunks = self.keys.stored(keys, req_context)
        # The step holds them since `lookup`; the agent's thread may have
        # cleared them in between.
        slots = self._engine.hold(chunks, held_before=True, holder=req_context.req_id)
        # vLLM's scheduler never calls touch().
        self._note_use(chunks, req_context)
        self._loads.update(chunks)
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release chunks whose copy to the GPU has ended."""
        chunks = self.keys.stored(keys, req_context)
        self._loads -= Counter(chunks)
        self._engine.release(chunks)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks as recently used."""
        self._engine.touch(self.keys.stored(keys, req_context))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve rows for the chunks that are not there yet, the leading ones that find room.

        The others are remembered, and offered again (`WarmrouteConnector`). Chunks that are there
        count as used: a prefix that the GPU holds is never loaded, but offered again by each
        request.
        """
        if not self.keys.may_store(req_context):
            return self.stores.none()
        offered = dict(zip(self.keys.stored(keys, req_context), keys, strict=True))
        self._note_use(list(offered), req_context)
        return self.stores.prepare(offered, req_context, self._used[req_context.req_id])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored chunks visible, or give their rows back."""
        self.stores.complete(keys, req_context, success=success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Promote what this step's lookups found below the pool; let go of what they held."""
        self.waits.end_step()
        self._release_step_holds()
        if not _TELLS_WHEN_FLUSHED:
            self._count_down_to_flushed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield what the tiers gained and lost, for vLLM's KV event stream."""
        events = self._engine.take_events()
        if not self._enable_events:
            return
        for event in events:
            medium, locality = _MEDIUM_BY_TIER[event.tier]
            yield OffloadingEvent(
                keys=self._offload_keys(event.keys),
                medium=medium,
                removed=not event.stored,
                locality=locality,
            )

    def reset_cache(self) -> None:
        """Empty the pool; rows of transfers under way follow when those have ended."""
        loads = list(self._loads.elements())
        self._flushing.append(_UnderWay(loads, self.stores.take_under_way()))
        self._loads.clear()
        self.waits.clear()
        self._used.clear()
        self._release_step_holds()
        # The tiers below stay: vLLM pauses and sleeps with this, which changes no weights.
        self._engine.clear([CPU])

    def weights_changed(self) -> None:
        """Begin an epoch: find nothing stored before, and store nothing under keys of before."""
        self.keys.versions.weights_changed()
        self._engine.clear(keep_shared=True)

    def _release_step_holds(self) -> None:
        if self._step_holds:
            self._engine.release(list(self._step_holds))
            self._step_holds.clear()

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

    def _release_flushed(self, under_way: _UnderWay) -> None:
        self._engine.release(under_way.loads)
        self._engine.complete_store(under_way.stores, success=False)

    def _offload_keys(self, chunks: Iterable[bytes]) -> list[OffloadKey]:
        return [make_offload_key(chunk, self._group_idx) for chunk in chunks]
