"""The KV cache engine: one lock and a clock around the decisions of `residency`.

Knows nothing of vLLM. `lower_tiers` moves bytes between the pool and the tiers below.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

from cacheengine.engine.deciding import Deciding
from cacheengine.engine.io_threads import IoThreads
from cacheengine.engine.long_calls import LongCalls
from cacheengine.engine.lower_tiers import LowerTiers
from cacheengine.engine.tier_io import Clock, MakeThreads
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import CPU, EngineStats, KeyEventRecord, to_wire
from cacheengine.residency import Decider, Holder, Presence, Promotion, StoreReservation
from cacheengine.settings import EngineConfig
from cacheengine.tiers import LocalTier, SharedTier
from warmroute_common import agent_protocol as wire

logger = logging.getLogger("vllm.warmroute")


class CacheEngine:
    """The cpu tier over ``pool``, and below it the disk and remote tiers that there are.

    ``tier`` and ``remote`` default to those of the configuration. Thread-safe; only the
    constructor, which scans the disk tier, and `close` wait for I/O. OSError: no directory.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        pool: Pool,
        *,
        clock: Clock = time.monotonic,
        tier: LocalTier | None = None,
        remote: SharedTier | None = None,
        make_threads: MakeThreads = IoThreads,
    ) -> None:
        if pool.slot_bytes != layout.chunk_bytes:
            raise ValueError(f"slots have {pool.slot_bytes} bytes, chunks {layout.chunk_bytes}")
        self.layout = layout
        self.incarnation = uuid.uuid4().hex
        self._pool = pool
        self._clock = clock
        self._deciding = Deciding()
        self._lock = self._deciding.lock
        self._listeners = self._deciding.listeners
        self._calls = LongCalls(self._deciding, clock)
        self._closed = False
        self._tiers = LowerTiers(
            config,
            layout,
            pool,
            tier,
            remote,
            deciding=self._deciding,
            clock=clock,
            make_threads=make_threads,
        )
        self._decider = Decider(
            pool.num_slots,
            config.cache_policy,
            self._tiers.indexes,
            chunk_bytes=layout.chunk_bytes,
            local_cpu=config.local_cpu,
            put_queue_share=config.put_queue_share,
        )
        self._deciding.begin(self._decider, self._tiers.start)

    # --- the scheduler's face ---

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is now; the remote tier is asked for one that is nowhere (UNKNOWN)."""
        with self._deciding() as decider:
            return decider.presence(key, self._clock())

    def try_hold(self, key: bytes) -> int | None:
        """Hold a chunk if it is ready, in one step, and return its slot; else None.

        Ends no pin: only `hold` counts as the use that a pin waits for.
        """
        with self._lock:
            return self._decider.try_hold(key)

    def hold(
        self, keys: Sequence[bytes], *, held_before: bool = False, holder: Holder = None
    ) -> list[int]:
        """Keep chunks in their slots until `release`, and return these; end the holder's pins.

        Raises KeyError, having held none, unless all are ready; or, with
        ``held_before``, held by the caller already (`try_hold`) and cleared since.
        """
        return self._calls.hold(keys, held_before=held_before, holder=holder)

    def release(self, keys: Collection[bytes]) -> None:
        """End one `hold` or `try_hold` of each chunk. KeyError if there was none."""
        self._calls.release([*keys])

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes; the caller holds its chunk, or has reserved it."""
        return self._pool.view(slot)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, given in prefix order; unknown ones are ignored."""
        self._calls.touch(keys)

    def prepare_store(
        self, keys: Sequence[bytes], *, prefix: Collection[bytes] = ()
    ) -> StoreReservation | None:
        """Reserve slots for chunks that are neither present nor pending; None: no room for any.

        Evicts others if needed, never one of ``keys``, of their ``prefix`` only what a lower tier
        has; of more than find room the leading ones are taken. `complete_store` must follow.
        """
        return self._calls.prepare_store(keys, prefix)

    def complete_store(
        self, keys: Collection[bytes], *, success: bool = True, prefetched: bool = False
    ) -> None:
        """Make reserved chunks visible and queue their puts, or free their slots.

        ``prefetched``: for a request to come. KeyError, changing nothing: no reservation.
        """
        self._calls.complete_store(keys, success=success, prefetched=prefetched)

    # --- promotion, pins ---

    def promote(self, keys: Sequence[bytes], *, pin_s: float, holder: Holder = None) -> Promotion:
        """Bring a prefix into the pool: start its reads and return at once.

        Its chunks are pinned for ``pin_s`` from when they are ready (0: no pin), or until the
        holder's `hold`; no other request's ends that pin. Chunks that the remote tier must be
        asked for are pending until it answers. From the first chunk on that is in no tier,
        finds no room or would pin more than `wire.MAX_PINNED_SHARE` of the pool all are missing.
        """
        return self._calls.promote(keys, pin_s, holder)

    def may_promote(self) -> bool:
        """Whether a chunk from below would find room now, and could be pinned."""
        return self._calls.may_promote()

    def reads_ended(self, tier: str) -> int:
        """How many reads from a lower tier were answered so far."""
        with self._lock:
            return self._decider.stats.below(tier).reads_ended

    def end_pins(self, keys: Iterable[bytes], holder: Holder) -> None:
        """End one holder's pins of chunks, given in prefix order."""
        self._calls.end_pins([*keys], holder)

    def expire_pins(self) -> int:
        """Take off promotions' pins whose deadline has passed; return how many."""
        return self._calls.expire_pins()

    # --- for the agent and the operator ---

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Return the fastest tier known to hold each chunk, up to the first that is nowhere."""
        return self._calls.match(keys)

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier is known to hold."""
        return self._calls.held_in(keys, tier)

    def is_putting(self, keys: Iterable[bytes], tier: str) -> bool:
        """Whether one of these chunks is on its way into a lower tier."""
        return self._calls.is_putting([*keys], tier)

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Keep leading chunks in a tier that holds them until `unpin` or `clear`; return how many.

        Half of a tier can be pinned so, nothing of the remote tier, which is not ours.
        """
        return self._calls.pin(keys, tier)

    def unpin(self, keys: Sequence[bytes], tier: str) -> int:
        """End the pins of leading chunks that a tier holds; return how many had one."""
        return self._calls.unpin(keys, tier)

    def clear(
        self,
        tiers: Collection[str] | None = None,
        keys: Collection[bytes] | None = None,
        *,
        keep_shared: bool = False,
    ) -> dict[str, int]:
        """Drop what these tiers (or all) hold, or of that these chunks; return how many, by tier.

        None of them is found any more when this returns, pinned or not; slots in use and files are
        freed soon after. Others' chunks in the remote tier stay, with ``keep_shared`` all of them.
        """
        if keys is not None:
            return self._calls.clear(tiers, keys, keep_shared=keep_shared)
        with self._deciding() as decider:
            return decider.clear(tiers, None, keep_shared=keep_shared)

    def snapshot(self) -> wire.Snapshot:
        """Return all keys by tier, from which the events after its number lead on."""
        with self._lock:
            seq = self._decider.events.last_seq
            there = [index.name for index in self._tiers.indexes if index.is_there]
        tiers: dict[str, bytes] = {tier: self._calls.packed_keys(tier) for tier in (CPU, *there)}
        return wire.Snapshot(incarnation=self.incarnation, seq=seq, tiers=tiers)

    @property
    def last_seq(self) -> int:
        """Number of the last event; 0 before the first."""
        with self._lock:
            return self._decider.events.last_seq

    def events_after(self, seq: int) -> wire.EventBatch | None:
        """Return what happened after event ``seq``; None when that is not known any more."""
        with self._lock:
            records = self._decider.events.after(seq)
            last_seq = self._decider.events.last_seq
        if records is None:
            return None
        events = list(map(to_wire, records))
        return wire.EventBatch(incarnation=self.incarnation, seq=last_seq, events=events)

    def add_event_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener``, which must be quick, after new events; return what ends that."""
        return self._listeners.add(listener)

    def take_events(self) -> list[KeyEventRecord]:
        """Return the events since the last call, for vLLM's own stream."""
        with self._lock:
            return self._decider.events.take()

    def tier_info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is; the remote's size is not known (0)."""
        slots, each = self._pool.num_slots, self._pool.slot_bytes
        with self._lock:
            used = len(self._decider.cpu)
            cpu = wire.TierInfo(capacity_bytes=slots * each, used_bytes=used * each)
            return {CPU: cpu, **self._tiers.info()}

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        with self._lock:
            stats = self._decider.counts()
        stats.cpu_held_bytes = self._calls.count_held() * self._pool.slot_bytes
        return stats

    def check(self) -> None:
        """Raise AssertionError if the engine's state contradicts itself."""
        with self._lock:
            self._decider.check()

    def close(self, *, drain_s: float = 5.0) -> None:
        """Write what is queued for lower tiers (``drain_s`` at most) and end the I/O. Idempotent.

        Lets go of the pool's buffer, unless a thread hangs in the kernel.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._tiers.close(self._lock, drain_s):
            self._pool.close()
        else:
            logger.warning("the cache engine closed while I/O was still hanging")
