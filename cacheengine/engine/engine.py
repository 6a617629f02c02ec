"""`CacheEngine`: the KV cache engine of a replica. Knows nothing of vLLM.

One lock and a clock around the decisions of `cacheengine.residency`; `tier_io` moves the bytes
between the pool and the tiers below it.

A call about many chunks takes the lock for a portion of them at a time, since the scheduler waits
for each hold of it, whichever thread has it. Between two portions other threads may change
anything; comments say what they may do, and why that does no harm.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from cacheengine.engine.engine_lock import EngineLock
from cacheengine.engine.pool_keeper import PoolKeeper
from cacheengine.engine.tier_io import Clock, IoThreads, MakeThreads, TierStack
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.kept_pool import PoolSeals
from cacheengine.memory import Pool
from cacheengine.record import CPU, BandwidthMeter, EngineStats, KeyEventRecord, to_wire
from cacheengine.residency.decider import Decider
from cacheengine.residency.decisions import (
    PORTION,
    PendingWork,
    Presence,
    Promotion,
    StoreReservation,
)
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import Holder, PoolEntry
from cacheengine.residency.state import SHARDS
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.step_meter import StepMeter
from cacheengine.tiers.tier import LocalTier, SharedTier
from warmroute_common import agent_protocol as wire
from warmroute_common.keys import key64

logger = logging.getLogger("vllm.warmroute")

_T = TypeVar("_T")

_MEASURED_CHUNKS: Final = 8
_KEEPER_END_S: Final = 0.5


class EngineIo(Protocol):
    """What an engine needs of the I/O of the tiers below the pool; `TierStack` is the real one."""

    @property
    def indexes(self) -> Sequence[LowerIndex]: ...

    def start(self, work: PendingWork) -> None: ...

    def info(self) -> dict[str, wire.TierInfo]: ...

    def close(self, drain_s: float) -> bool: ...


def portions(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield items in order, as many at once as are decided about in one hold of the lock."""
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]


class CacheEngine:
    """The cpu tier over ``pool``, and below it the disk and remote tiers that there are.

    ``tier`` and ``remote`` default to those of the configuration. Thread-safe; only the
    constructor, which scans the disk tier, `clear_shared` and `close` wait for I/O. ``seals`` are
    those of a pool that is kept (`start_keeping` must follow); they are closed with it. ``make_io``
    replaces the I/O of all tiers, for simulation. OSError: a directory cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        pool: Pool,
        *,
        seals: PoolSeals | None = None,
        clock: Clock = time.monotonic,
        tier: LocalTier | None = None,
        remote: SharedTier | None = None,
        make_threads: MakeThreads = IoThreads,
        make_io: Callable[[EngineLock], EngineIo] | None = None,
    ) -> None:
        if pool.slot_bytes != layout.chunk_bytes:
            raise ValueError(f"slots have {pool.slot_bytes} bytes, chunks {layout.chunk_bytes}")
        self.layout = layout
        self.slots = pool.num_slots
        self.incarnation = uuid.uuid4().hex
        self.steps = StepMeter()
        """What the model's steps take, added by the scheduler's thread."""
        self.loads = BandwidthMeter()
        """Loads from the pool to the GPU, added by the scheduler's thread."""
        self._pool = pool
        self._clock = clock
        self._closed = False
        self._lock = lock = EngineLock()
        self._io: EngineIo
        self._remote: SharedTier | None = None
        if make_io is not None:
            self._io = make_io(lock)
        else:
            self._io = stack = TierStack(
                config,
                layout,
                pool,
                tier,
                remote,
                lock=lock,
                clock=clock,
                make_threads=make_threads,
            )
            self._remote = stack.remote
        self._decider = Decider(
            pool.num_slots,
            config.cache_policy,
            self._io.indexes,
            chunk_bytes=layout.chunk_bytes,
            local_cpu=config.local_cpu,
            put_queue_share=config.put_queue_share,
            seals=seals,
        )
        lock.begin(self._decider, self._io.start)
        self._seals = seals
        self._keeper: PoolKeeper | None = None

    # --- for the scheduler: lookups, holds, uses ---

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is now; the remote tier is asked for one that is nowhere (UNKNOWN)."""
        with self._lock as decider:
            return decider.presence(key, self._clock())

    def try_hold(self, key: bytes) -> int | None:
        """Hold a chunk if it is ready, in one step, and return its slot; otherwise return None.

        Ends no pin: only `hold` counts as the use that a pin waits for.
        """
        with self._lock as decider:
            return decider.try_hold(key)

    def hold(
        self, keys: Sequence[bytes], *, held_before: bool = False, holder: Holder = None
    ) -> list[int]:
        """Keep chunks in their slots until `release`, and return the slots; end the holder's pins.

        Raises KeyError, having held none, unless all are ready; or, with ``held_before``, held by
        the caller already (`try_hold`) and cleared since.
        """
        if len(keys) <= PORTION:
            with self._lock as decider:
                slots = decider.hold(keys, held_before=held_before)
                decider.note_hold(keys, holder)
            return slots
        # Between portions others may clear a chunk that is not held yet: then none is held. A
        # chunk that is held already keeps its slot, cleared or not.
        slots = []
        try:
            for portion in portions(keys):
                with self._lock as decider:
                    slots += decider.hold(portion, held_before=held_before)
        except KeyError:
            self.release(keys[: len(slots)])
            raise
        # Pins end only when all are held.
        for portion in portions(keys):
            with self._lock as decider:
                decider.note_hold(portion, holder)
        return slots

    def release(self, keys: Collection[bytes]) -> None:
        """End one `hold` or `try_hold` of each chunk. KeyError if there was none."""
        # The chunks of later portions are kept by their holds until it is their turn.
        for portion in portions([*keys]):
            with self._lock as decider:
                decider.release(portion, self._clock())

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes; the caller holds its chunk, or has reserved it."""
        return self._pool.view(slot)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, given in prefix order; unknown ones are ignored."""
        # The end of the prefix first. Chunks that others use in between come to lie between
        # chunks of the prefix, whose first chunk is still more recent than all that follow it.
        for portion in reversed([*portions(keys)]):
            with self._lock as decider:
                decider.touch(portion, self._clock())

    # --- stores ---

    def prepare_store(
        self, keys: Sequence[bytes], *, prefix: Collection[bytes] = ()
    ) -> StoreReservation | None:
        """Reserve slots for chunks that are neither present nor pending; None: no room for any.

        Evicts others if needed, never one of ``keys``, and of their ``prefix`` only chunks that a
        lower tier has. If there is not room for all, the leading chunks are taken.
        `complete_store` must follow.
        """
        wanted = list(dict.fromkeys(keys))
        with self._lock as decider:
            is_more = decider.watch(self._clock())
            protected = decider.protected(wanted, prefix)
        self._watch(is_more)
        made = StoreReservation((), (), ())
        # No eviction takes a reserved slot. Between portions others may take free slots, or store
        # one of the chunks: then fewer find room, or that chunk is not wanted any more.
        for portion in portions(wanted):
            with self._lock as decider:
                part = decider.prepare_store(
                    portion, self._clock(), protected, is_refused=bool(made.refused)
                )
            made = made.joined(part)
        return made if made.keys or not made.refused else None

    def complete_store(
        self, keys: Collection[bytes], *, success: bool = True, prefetched: bool = False
    ) -> None:
        """Make reserved chunks visible and queue their puts, or free their slots.

        ``prefetched``: for a request to come. KeyError, changing nothing: no reservation.
        """
        wanted = list(dict.fromkeys(keys))
        # A reservation belongs to its caller alone. So a chunk that has one in this loop still
        # has it in the next, cleared or not.
        for portion in portions(wanted):
            with self._lock as decider:
                decider.check_stores(portion)
        stored: list[PoolEntry] = []
        # From the end of the prefix on, so that the first chunk is the most recent.
        for portion in reversed([*portions(wanted)]):
            with self._lock as decider:
                whole = decider.end_stores(
                    portion, self._clock(), success=success, prefetched=prefetched
                )
            stored += reversed(whole)
        stored.reverse()
        # From the first chunk on, since the queue may be short. Until its put is queued a chunk is
        # held: others may find it and clear it, but nothing takes its slot.
        for entries in portions(stored):
            with self._lock as decider:
                decider.put_down(entries, self._clock())

    # --- a pool that is kept ---

    def start_keeping(self) -> None:
        """Begin to check and seal the chunks of a pool that is kept; to be called once."""
        if self._seals is not None:
            kept = self._seals.kept
            self._keeper = PoolKeeper(self._lock, self._pool, kept, self._clock)
            self._seals.kept = []  # hundreds of bytes a chunk, and not used again
            self.add_event_listener(self._keeper.wake)
            self._keeper.start()

    # --- promotion, pins ---

    def promote(
        self,
        keys: Sequence[bytes],
        *,
        pin_s: float,
        holder: Holder = None,
        is_demand: bool = False,
    ) -> Promotion:
        """Bring a prefix into the pool: start its reads and return at once.

        Reads on ``is_demand``, for a request that waits, begin before all others.

        Its chunks are pinned for ``pin_s`` from when they are ready (0: no pin), or until the
        holder's `hold`; no other request's ends that pin. Chunks that the remote tier must be
        asked for are pending until it answers. From the first chunk on that is in no tier, finds
        no room or would pin more than `wire.MAX_PINNED_SHARE` of the pool, all are missing.
        """
        # First of all, so that wanted chunks leave the front of the order, where room is looked
        # for.
        self.touch(keys)
        self._expire_pins_if_full()
        if self._keeper is not None:
            self._keeper.want(keys)
        with self._lock as decider:
            prefix = decider.promotions.begin(keys, pin_s, holder, is_demand=is_demand)
            is_more = decider.promotions.advance(prefix, self._clock())
        # No later portion evicts a chunk that this one has pinned, nor an unpinned chunk of the
        # prefix. Others may evict or clear a chunk that is not reached yet: as if they had come
        # before this call. Where the remote tier is asked, its I/O continues with the rest.
        while is_more:
            with self._lock as decider:
                is_more = decider.promotions.advance(prefix, self._clock())
        return prefix.promotion

    def may_promote(self) -> bool:
        """Whether a chunk from below would find room now, and could be pinned."""
        self._expire_pins_if_full()
        with self._lock as decider:
            return decider.may_promote(self._clock())

    def _watch(self, is_more: bool) -> None:
        """Give up what waits for a tier that hangs; have a remote tier that failed pinged."""
        # What others queue between two portions is given up, too.
        while is_more:
            with self._lock as decider:
                is_more = decider.watch(self._clock())

    def _expire_pins_if_full(self) -> None:
        with self._lock as decider:
            is_more = decider.watch(self._clock())
            may_pin = decider.pool.may_pin(None)
        self._watch(is_more)
        if not may_pin:
            # Expired pins count against the limit until they are taken off.
            self.expire_pins()

    def arrivals(self, keys: Sequence[bytes]) -> list[float | None]:
        """Return in how many seconds each chunk is expected if it is promoted now; None: ready.

        A chunk of which nothing is known, and one that is stored now, is expected at once.
        """
        found: list[float | None] = []
        queued: Counter[str] = Counter()
        # Reads that others queue between two portions make the answer a little too early.
        for portion in portions(keys):
            with self._lock as decider:
                found += decider.promotions.arrivals(portion, queued, self._clock())
        return found

    def arrival_s(self, promotion: Promotion) -> float:
        """Return in how many seconds the last of a promotion's reads is expected to end."""
        with self._lock as decider:
            return decider.promotions.arrival_s(promotion, self._clock())

    def measure_again(self, keys: Sequence[bytes]) -> None:
        """Read a few chunks for nobody, if their tier's speed was not measured for a while."""
        with self._lock as decider:
            is_stale = decider.promotions.is_stale(keys[0], self._clock())
        if is_stale:
            self.promote(keys[:_MEASURED_CHUNKS], pin_s=0.0)

    def room_s(self) -> float:
        """Return in how many seconds a full pool may have room: 0 if at any moment.

        That is so while requests use or pin chunks; a prefetch's pin is expected to last.
        """
        with self._lock as decider:
            return decider.pool.room_s(self._clock())

    def leave(self, keys: Iterable[bytes], holder: str, *, keep_ready: bool = False) -> None:
        """End a holder's pins of chunks, given in prefix order, and its waits for them.

        Reads that have not begun, and that nobody else waits for, are given up. ``keep_ready``:
        pins of chunks that are ready stay.
        """
        # From the end of the prefix on. A pin that the holder gets meanwhile stays or ends with
        # the others.
        for portion in reversed([*portions([*keys])]):
            with self._lock as decider:
                decider.leave(portion, holder, self._clock(), keep_ready=keep_ready)

    def expire_pins(self) -> int:
        """Take off promotions' pins whose deadline has passed; return how many.

        To be called once a second: it also gives up what waits for a tier that hangs, and has a
        remote tier that failed pinged.
        """
        self._watch(is_more=True)
        # A pin that another thread extends meanwhile is not taken off.
        ended, is_more = 0, True
        while is_more:
            with self._lock as decider:
                count, is_more = decider.expire_pins(self._clock())
                ended += count
        return ended

    # --- for the agent and the operator ---

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Return the fastest tier known to hold each chunk, up to the first that is nowhere."""
        # An answer is as old as its first portion.
        tiers: list[str] = []
        for portion in portions(keys):
            with self._lock as decider:
                found = decider.match(portion, self._clock())
            tiers += found
            if len(found) < len(portion):
                break
        return tiers

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier is known to hold."""
        return self._count_leading(keys, lambda decider, part: decider.held_in(part, tier))

    def is_putting(self, keys: Iterable[bytes], tier: str) -> bool:
        """Whether one of these chunks is on its way into a lower tier."""
        # A put that begins later is not asked about.
        for portion in portions([*keys]):
            with self._lock as decider:
                if decider.is_putting(portion, tier):
                    return True
        return False

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Keep leading chunks in a tier that holds them until `unpin` or `clear`; return how many.

        Half of a tier can be pinned so. In the remote tier, which others share, nothing can.
        """
        # Chunks of earlier portions stay pinned, whatever happens to the next.
        return self._count_leading(keys, lambda decider, part: decider.operator_pin(part, tier))

    def _count_leading(
        self, keys: Sequence[bytes], count: Callable[[Decider, Sequence[bytes]], int]
    ) -> int:
        """Count chunks from the first on, until ``count`` counts fewer than it was given."""
        total = 0
        for portion in portions(keys):
            with self._lock as decider:
                counted = count(decider, portion)
            total += counted
            if counted < len(portion):
                break
        return total

    def unpin(self, keys: Sequence[bytes], tier: str) -> int:
        """End the pins of leading chunks that a tier holds; return how many had one."""
        held = keys[: self.held_in(keys, tier)]
        unpinned = 0
        # From the end on, since the first chunk must be evicted last. A chunk that has left the
        # tier since it was counted has no pin any more.
        for portion in reversed([*portions(held)]):
            with self._lock as decider:
                unpinned += decider.operator_unpin(portion, tier, self._clock())
        return unpinned

    def clear(
        self,
        tiers: Collection[str] | None = None,
        keys: Collection[bytes] | None = None,
        *,
        keep_shared: bool = False,
    ) -> dict[str, int]:
        """Drop all chunks of these tiers (or of all), or these chunks; return how many, by tier.

        None of them is found any more when this returns, pinned or not; slots in use and files are
        freed soon after. In the remote tier, chunks that this engine does not know stay until
        `clear_shared`; with ``keep_shared`` all of them stay.
        """
        if keys is None:
            with self._lock as decider:
                return decider.clear(tiers, None, keep_shared=keep_shared)
        # A chunk of an earlier portion that others store again is stored after this call.
        dropped: Counter[str] = Counter()
        for portion in [*portions(list(dict.fromkeys(keys)))] or [()]:
            with self._lock as decider:
                dropped.update(decider.clear(tiers, portion, keep_shared=keep_shared))
        return dict(dropped)

    def clear_shared(self, keys: Collection[bytes] | None) -> int | None:
        """Remove chunks, or all of this layout, from the remote tier, whoever has put them.

        After `clear`. Waits for I/O. Returns how many there were, None if some may be left.
        """
        if self._remote is None:
            return None
        return self._remote.purge(None if keys is None else [*keys])

    def snapshot(self) -> wire.Snapshot:
        """Return all keys by tier; the events after its number continue from there."""
        with self._lock as decider:
            seq = decider.events.last_seq
            tiers = [CPU, *(index.name for index in self._io.indexes if index.is_there)]
        packed: dict[str, bytes] = {tier: self._packed_keys(tier) for tier in tiers}
        return wire.Snapshot(incarnation=self.incarnation, seq=seq, tiers=packed)

    def _packed_keys(self, tier: str) -> bytes:
        # Each part is of another moment. A key stored or removed meanwhile may be listed or not.
        # Whoever has the events from before the first part on learns of it in either case, and
        # the last event about a key says what is true: a key stored again, or removed and not
        # listed, changes nothing for them.
        packed = []
        shard = 0
        while shard < SHARDS:
            with self._lock as decider:
                part, shard = decider.state.reported[tier].listed(shard)
            packed.append(wire.pack_keys(map(key64, part)))
        return b"".join(packed)

    # --- events, counters ---

    @property
    def last_seq(self) -> int:
        """Number of the last event; 0 before the first."""
        with self._lock as decider:
            return decider.events.last_seq

    def events_after(self, seq: int) -> wire.EventBatch | None:
        """Return the events after number ``seq``; None when some of them are not known any more."""
        with self._lock as decider:
            records = decider.events.after(seq)
            last_seq = decider.events.last_seq
        if records is None:
            return None
        events = list(map(to_wire, records))
        return wire.EventBatch(incarnation=self.incarnation, seq=last_seq, events=events)

    def add_event_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener``, which must be quick, after new events; return what ends that."""
        return self._lock.listeners.add(listener)

    def take_events(self) -> list[KeyEventRecord]:
        """Return the events since the last call, for vLLM's own stream."""
        with self._lock as decider:
            return decider.events.take()

    def tier_info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is; the remote tier's size is not known (0)."""
        slots, each = self.slots, self._pool.slot_bytes
        with self._lock as decider:
            used = len(decider.pool)
            cpu = wire.TierInfo(
                capacity_bytes=slots * each,
                used_bytes=used * each,
                read_bytes_per_s=self.loads.bytes_per_s(),
                read_bytes=self.loads.total_bytes,
            )
            return {CPU: cpu, **self._io.info()}

    def stats(self) -> EngineStats:
        with self._lock as decider:
            stats = decider.counts()
            held = decider.pool.count_kept(self._clock())
        stats.cpu_held_bytes = held * self._pool.slot_bytes
        return stats

    def check(self) -> None:
        with self._lock as decider:
            decider.check()

    def close(self, *, drain_s: float = 5.0) -> None:
        """Write queued puts for lower tiers (``drain_s`` at most) and end the I/O. Idempotent.

        Releases the pool's buffer, unless a thread hangs in the kernel.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._keeper is not None:
            self._keeper.stop(drain_s)
        ended = self._io.close(drain_s)
        if self._keeper is not None:
            ended = self._keeper.join(_KEEPER_END_S) and ended
        if ended:
            self._pool.close()
            if self._seals is not None:
                self._seals.close()
        else:
            logger.warning("the cache engine was closed while a thread still hangs in its I/O")
