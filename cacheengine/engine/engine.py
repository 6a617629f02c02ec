"""The KV cache engine: numbered slots of a pool, and the tiers below it.

Knows nothing of vLLM. `residency` decides under one lock; this module is that
lock and the clock; `tier_io` has the threads that move bytes between the pool
and a lower tier.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from cacheengine import wire
from cacheengine.engine.configured_tiers import make_remote, make_tier
from cacheengine.engine.io_threads import IoThreads
from cacheengine.engine.tier_io import Clock, MakeThreads, TierIo
from cacheengine.identity import ChunkLayout
from cacheengine.keys import key64
from cacheengine.memory import Pool
from cacheengine.record import CPU, EngineStats, KeyEventRecord, to_wire
from cacheengine.residency import (
    Decider,
    LowerIndex,
    Presence,
    Promotion,
    RemoteIndex,
    StoreReservation,
    TierIndex,
    Todo,
    count_held,
    make_decider,
)
from cacheengine.settings import EngineConfig
from cacheengine.tiers import LocalTier, SharedTier, Tier

logger = logging.getLogger("vllm.warmroute")

_DRAIN_S: Final = 5.0
_END_S: Final = 5.0
_TIER_NAMES: Final = (CPU, "disk", "remote")


class CacheEngine:
    """The cpu tier over ``pool``, and below it the disk and remote tiers that there are.

    ``tier`` and ``remote`` default to those of the configuration. Thread-safe.
    No call waits for I/O except `close` (and the constructor, which scans the
    disk tier). Raises OSError when the disk tier's directory cannot be used.
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
            raise ValueError(
                f"the pool's slots have {pool.slot_bytes} bytes, the layout's chunks "
                f"{layout.chunk_bytes}"
            )
        self.layout = layout
        self.incarnation = uuid.uuid4().hex
        self._pool = pool
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._tier = tier if tier is not None else make_tier(config, layout)
            undo.callback(self._tier.close)
            self._remote = remote if remote is not None else make_remote(config, layout)
            undo.callback(self._close_remote)
            self._disk = TierIndex(self._tier.capacity_bytes, self._tier.item_bytes)
            below: list[tuple[Tier, LowerIndex]] = [(self._tier, self._disk)]
            if self._remote is not None:
                below.append((self._remote, RemoteIndex()))
            self._decider = make_decider(
                pool.num_slots,
                config.cache_policy,
                [index for _, index in below],
                chunk_bytes=layout.chunk_bytes,
                local_cpu=config.local_cpu,
                put_queue_share=config.put_queue_share,
            )
            self._adopt_what_is_stored()
            undo.pop_all()
        self._io = [
            TierIo(
                each,
                index,
                pool,
                config=config,
                deciding=self._deciding,
                clock=clock,
                make_threads=make_threads,
            )
            for each, index in below
        ]

    def _adopt_what_is_stored(self) -> None:
        keys = self._tier.scan()
        excess = self._disk.adopt(keys)
        self._tier.delete(excess)
        self._decider.cascades["disk"].deleted(excess)
        if keys:
            logger.info(
                "%s tier: %d chunks of an earlier run are served again, %d were too many",
                self._tier.name,
                len(keys) - len(excess),
                len(excess),
            )

    # --- the scheduler's face ---

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is, and promise nothing for later.

        A chunk that is nowhere begins to be asked for at the remote tier, if
        there is one: UNKNOWN until the answer is there.
        """
        with self._deciding() as decider:
            return decider.presence(key, self._clock())

    def try_hold(self, key: bytes) -> int | None:
        """Hold a chunk if it is ready, and return its slot; else None.

        Looking and holding are one step: no other thread can evict between.
        Does not end a pin: only `hold` counts as the use that a pin waits for.
        """
        with self._lock:
            return self._decider.try_hold(key)

    def hold(self, keys: Sequence[bytes], *, held_before: bool = False) -> list[int]:
        """Keep chunks in their slots until `release`; end their pins; return the slots.

        Raises KeyError, having held none, unless all are ready. With
        ``held_before`` the caller has a hold of each already (`try_hold`), and
        takes another even of one that was cleared since.
        """
        with self._lock:
            return self._decider.hold(keys, held_before=held_before)

    def release(self, keys: Collection[bytes]) -> None:
        """End one `hold` or `try_hold` of each chunk. KeyError if there was none."""
        with self._deciding() as decider:
            decider.release(keys, self._clock())

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes; the caller holds its chunk, or has reserved it."""
        return self._pool.view(slot)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, given in prefix order; unknown ones are ignored."""
        with self._lock:
            self._decider.touch(keys)

    def prepare_store(self, keys: Sequence[bytes]) -> StoreReservation | None:
        """Reserve slots for those of the chunks that are neither present nor pending.

        Evicts others if needed, never one of ``keys``. Of more than finds room
        the leading ones; None: room for none. The chunks become visible with
        `complete_store`, which must follow.
        """
        with self._deciding() as decider:
            return decider.prepare_store(keys, self._clock())

    def complete_store(
        self, keys: Collection[bytes], *, success: bool = True, prefetched: bool = False
    ) -> None:
        """Make reserved chunks visible and queue their puts, or give their slots back.

        ``prefetched``: for a request to come. KeyError, changing nothing: no reservation.
        """
        with self._deciding() as decider:
            decider.complete_store(keys, self._clock(), success=success, prefetched=prefetched)

    # --- promotion, pins ---

    def promote(self, keys: Sequence[bytes], *, pin_s: float) -> Promotion:
        """Bring a prefix into the pool: start its reads and return at once.

        Chunks in lower tiers are read (one being read already is joined),
        those in the pool stay; all are pinned until `hold`, at most for
        ``pin_s`` from when they are ready (0: no pin). Where it is not known
        whether the remote tier holds a chunk, it is asked for that and all
        that follow, which are pending until it answers. Stops at the first
        chunk that is in no tier or finds no room: that one and the rest are
        missing. At most three quarters of the pool can be pinned.
        """
        with self._deciding() as decider:
            return decider.promote(keys, pin_s, self._clock())

    def expire_pins(self) -> int:
        """Take off promotions' pins whose deadline has passed; return how many."""
        with self._deciding() as decider:
            return decider.expire_pins(self._clock())

    # --- for the agent and the operator ---

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Return the fastest tier of each chunk, up to the first that is nowhere.

        The remote tier counts where it is known to hold a chunk; nothing is asked.
        """
        with self._lock:
            return self._decider.match(keys, self._clock())

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier holds, for the remote as far as is known."""
        with self._lock:
            return self._decider.operator_pins.held_in(keys, tier)

    def is_putting(self, keys: Iterable[bytes], tier: str) -> bool:
        """Whether one of these chunks is on its way into a lower tier."""
        with self._lock:
            puts = self._decider.cascades.get(tier)
            return puts is not None and any(map(puts.has, keys))

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Keep leading chunks in a tier that holds them until `unpin` or `clear`.

        Returns how many are pinned now: fewer than the tier holds once half of
        it is pinned so, none in the remote tier, which is not ours.
        """
        with self._lock:
            return self._decider.operator_pins.pin(keys, tier)

    def unpin(self, keys: Sequence[bytes], tier: str) -> int:
        """End the pins of leading chunks that a tier holds; return how many had one."""
        with self._deciding() as decider:
            return decider.operator_pins.unpin(keys, tier, self._clock())

    def clear(
        self, tiers: Collection[str] | None = None, keys: Collection[bytes] | None = None
    ) -> dict[str, int]:
        """Drop what these tiers (or all) hold, or of that these chunks; return how many, by tier.

        Nothing of it can be found any more when this returns, pinned or not.
        Slots in use come back when their users are done, files are removed
        soon after. From the remote tier what this engine knows it to hold is
        deleted; what others put there is found again when it is asked for.
        Raises ValueError for a name that is no tier.
        """
        if unknown := sorted(set(tiers or ()) - set(_TIER_NAMES)):
            names = ", ".join(_TIER_NAMES)
            raise ValueError(f"no tier is called {', '.join(unknown)}; use {names}")
        with self._deciding() as decider:
            return decider.clear(
                _TIER_NAMES if tiers is None else tiers, None if keys is None else set(keys)
            )

    def snapshot(self) -> wire.Snapshot:
        """Return all keys by tier as of one moment."""
        with self._lock:
            keys = {CPU: self._decider.cpu.ready_keys()}
            for index in self._decider.state.lower:
                if index.is_there:
                    keys[index.name] = index.keys()
            seq = self._decider.events.last_seq
        # Packing a million keys takes a second: not under the lock.
        tiers = {tier: wire.pack_keys(map(key64, held)) for tier, held in keys.items()}
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
        return wire.EventBatch(
            incarnation=self.incarnation,
            seq=last_seq,
            events=[to_wire(record) for record in records],
        )

    def add_event_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after new events, on any thread; return what ends that.

        It must be quick and must not raise.
        """
        with self._lock:
            self._listeners.append(listener)

        def forget() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    def take_events(self) -> list[KeyEventRecord]:
        """Return the events since the last call, for vLLM's own stream."""
        with self._lock:
            return self._decider.events.take()

    def tier_info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is; the remote's size is not known (0)."""
        with self._lock:
            slot_bytes = self._pool.slot_bytes
            tiers = {
                CPU: wire.TierInfo(
                    capacity_bytes=self._pool.num_slots * slot_bytes,
                    used_bytes=len(self._decider.cpu) * slot_bytes,
                )
            }
            for io in self._io:
                if io.index.is_there:
                    tiers[io.name] = io.info()
        return tiers

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        with self._lock:
            stats = self._decider.counts()
            entries = list(self._decider.cpu)
        # Not under the lock: a million take a while.
        stats.cpu_held_bytes = count_held(entries, self._clock()) * self._pool.slot_bytes
        return stats

    def check(self) -> None:
        """Raise AssertionError if the engine's state contradicts itself."""
        with self._lock:
            self._decider.check()

    def close(self, *, drain_s: float = _DRAIN_S) -> None:
        """Write what is queued for lower tiers (``drain_s`` at most) and end the I/O. Idempotent.

        Lets go of the pool's buffer, unless a thread hangs in the kernel.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for io in self._io:
                io.stop_reading()
        for io in self._io:
            io.stop()
        self._join(TierIo.join_writers, drain_s)
        with self._lock:
            # Puts still queued now are dropped as soon as a thread sees them.
            for io in self._io:
                io.stop_writing()
        self._close_remote()  # before its threads end: calls that wait for its server fail now
        ended = self._join(TierIo.join, _END_S)
        self._tier.close()
        if ended:
            self._pool.close()
        else:
            logger.warning("the cache engine closed while I/O was still hanging")

    def _join(self, join: Callable[[TierIo, float], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended = True
        for io in self._io:
            ended = join(io, max(0.0, deadline_s - time.monotonic())) and ended
        return ended

    def _close_remote(self) -> None:
        if self._remote is not None:
            self._remote.close()

    # --- decisions and what follows from them ---

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[Decider]:
        """Lend the state under the lock, then do what was decided, without it."""
        with self._lock:
            yield self._decider
            todo = self._decider.take_todo()
            listeners = tuple(self._listeners) if todo and todo.has_news else ()
        if todo is not None:
            self._start(todo)
        for listener in listeners:
            try:
                listener()
            except Exception:  # what called us may be an I/O thread with entries in its hands
                logger.exception("a listener to the cache engine's events failed")

    def _start(self, todo: Todo) -> None:
        for io in self._io:
            deletes = todo.deletes.get(io.name, ())
            io.start(todo.gets[io.name], todo.puts[io.name], deletes, asks=todo.asks)
        for promotion, outcome, chunks in todo.settled:
            promotion.settle(outcome, chunks)
