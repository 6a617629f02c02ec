"""The KV cache engine: numbered slots of a pool, and the tiers below it.

Knows nothing of vLLM. `residency` decides under one lock; this module is that
lock, the clock, and the threads that move bytes between pool and lower tier.
"""

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

from cacheengine import wire
from cacheengine.chunk import ChunkLayout
from cacheengine.config import EngineConfig
from cacheengine.decisions import Presence, StoreReservation, Todo
from cacheengine.events import KeyEventRecord, to_wire
from cacheengine.eviction import make_policy
from cacheengine.index import CpuIndex, Entry
from cacheengine.io_threads import IoThreads, JobRunner
from cacheengine.keys import key64
from cacheengine.ledger import CPU, Ledger
from cacheengine.pool import Pool
from cacheengine.promotion import Promotion, PromotionCounts
from cacheengine.residency import Residency
from cacheengine.stats import BandwidthMeter, EngineStats
from cacheengine.tier_index import TierIndex
from cacheengine.tiers.base import GetOutcome, LocalTier, PutOutcome
from cacheengine.tiers.configured import make_tier

__all__ = [
    "CacheEngine",
    "KeyEventRecord",
    "Presence",
    "Promotion",
    "PromotionCounts",
    "StoreReservation",
]

logger = logging.getLogger("vllm.warmroute")

Clock = Callable[[], float]

_DRAIN_S: Final = 5.0
_END_S: Final = 5.0
_DELETE_BATCH: Final = 64


class CacheEngine:
    """The cpu tier over ``pool``, and the disk tier if the configuration names one.

    Thread-safe. No call waits for I/O except `close` (and the constructor,
    which scans the disk tier). Raises OSError when the disk tier's directory
    cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        pool: Pool,
        *,
        clock: Clock = time.monotonic,
        tier: LocalTier | None = None,
        make_threads: Callable[[str, int], JobRunner] = IoThreads,
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
        self._tier = tier if tier is not None else make_tier(config, layout)
        self._lock = threading.Lock()
        self._state = Residency(
            Ledger(
                CpuIndex(pool.num_slots, make_policy(config.cache_policy)),
                TierIndex(self._tier.capacity_bytes, self._tier.item_bytes),
                tier_name=self._tier.name,
                chunk_bytes=layout.chunk_bytes,
                keep_in_cpu=config.local_cpu,
            ),
            max_queued_puts=max(1, int(config.put_queue_share * pool.num_slots)),
        )
        self._read_meter = BandwidthMeter()
        self._write_meter = BandwidthMeter()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self._draining = True
        self._adopt_what_is_stored()
        self._readers = make_threads("kv-get", config.disk_read_threads)
        self._writers = make_threads("kv-put", config.disk_write_threads)

    def _adopt_what_is_stored(self) -> None:
        keys = self._tier.scan()
        excess = self._state.tier.adopt(keys)
        self._tier.delete(excess)
        self._state.puts.deleted(excess)
        if keys:
            logger.info(
                "%s tier: %d chunks of an earlier run are served again, %d were too many",
                self._tier.name,
                len(keys) - len(excess),
                len(excess),
            )

    # --- the scheduler's face ---

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is. Changes nothing, and promises nothing for later."""
        with self._lock:
            return self._state.presence(key)

    def try_hold(self, key: bytes) -> int | None:
        """Hold a chunk if it is ready, and return its slot; else None.

        Looking and holding are one step: no other thread can evict between.
        Does not end a pin: only `hold` counts as the use that a pin waits for.
        """
        with self._lock:
            return self._state.try_hold(key)

    def hold(self, keys: Sequence[bytes], *, held_before: bool = False) -> list[int]:
        """Keep chunks in their slots until `release`; end their pins; return the slots.

        Raises KeyError, having held none, unless all are ready. With
        ``held_before`` the caller has a hold of each already (`try_hold`), and
        takes another even of one that was cleared since.
        """
        with self._lock:
            return self._state.hold(keys, held_before=held_before)

    def release(self, keys: Collection[bytes]) -> None:
        """End one `hold` or `try_hold` of each chunk. KeyError if there was none."""
        with self._deciding() as state:
            state.release(keys, self._clock())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, given in prefix order; unknown ones are ignored."""
        with self._lock:
            self._state.touch(keys)

    def prepare_store(self, keys: Sequence[bytes]) -> StoreReservation | None:
        """Reserve slots for those of the chunks that are neither present nor pending.

        Evicts others if needed, never one of ``keys``. None: no room. The
        chunks become visible with `complete_store`, which must follow.
        """
        with self._deciding() as state:
            return state.prepare_store(keys, self._clock())

    def complete_store(self, keys: Collection[bytes], *, success: bool = True) -> None:
        """Make reserved chunks visible and queue their puts, or give their slots back.

        Raises KeyError, changing nothing, for a chunk that has no reservation.
        """
        with self._deciding() as state:
            state.complete_store(keys, self._clock(), success=success)

    # --- promotion, pins ---

    def promote(self, keys: Sequence[bytes], *, pin_s: float) -> Promotion:
        """Bring a prefix into the pool: start its reads and return at once.

        Chunks on disk are read (one being read already is joined), those in
        the pool stay; all are pinned until `hold`, at most for ``pin_s`` from
        when they are ready (0: no pin). Stops at the first chunk that is in no
        tier or finds no room: that one and the rest are missing.
        """
        with self._deciding() as state:
            return state.promote(keys, pin_s, self._clock())

    def expire_pins(self) -> int:
        """Take off pins whose deadline has passed; return how many."""
        with self._deciding() as state:
            return state.expire_pins(self._clock())

    # --- for the agent and the operator ---

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Return the fastest tier of each chunk, up to the first that is nowhere."""
        with self._lock:
            return self._state.match(keys)

    def clear(self, tiers: Collection[str] | None = None) -> dict[str, int]:
        """Drop what these tiers (or all) hold; return chunks dropped, by tier.

        Nothing of it can be found any more when this returns, pinned or not.
        Slots in use come back when their users are done, files are removed
        soon after. Raises ValueError for a name that is no tier.
        """
        known = {CPU, "disk", "remote"}
        if tiers is not None and not known.issuperset(tiers):
            unknown = sorted(set(tiers) - known)
            raise ValueError(f"no tier is called {', '.join(unknown)}; use cpu or disk")
        with self._deciding() as state:
            return state.clear(known if tiers is None else tiers)

    def snapshot(self) -> wire.Snapshot:
        """Return all keys by tier as of one moment."""
        with self._lock:
            cpu = self._state.cpu.ready_keys()
            below = self._state.tier.keys()
            seq = self._state.events.last_seq
        # Packing a million keys takes a second: not under the lock.
        tiers = {CPU: wire.pack_keys(map(key64, cpu))}
        if self._tier.capacity_bytes:
            tiers[self._tier.name] = wire.pack_keys(map(key64, below))
        return wire.Snapshot(incarnation=self.incarnation, seq=seq, tiers=tiers)

    @property
    def last_seq(self) -> int:
        """Number of the last event; 0 before the first."""
        with self._lock:
            return self._state.events.last_seq

    def events_after(self, seq: int) -> wire.EventBatch | None:
        """Return what happened after event ``seq``; None when that is not known any more."""
        with self._lock:
            records = self._state.events.after(seq)
            last_seq = self._state.events.last_seq
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
            return self._state.events.take()

    def tier_info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is."""
        with self._lock:
            slot_bytes = self._pool.slot_bytes
            tiers = {
                CPU: wire.TierInfo(
                    capacity_bytes=self._pool.num_slots * slot_bytes,
                    used_bytes=len(self._state.cpu) * slot_bytes,
                )
            }
            if self._tier.capacity_bytes:
                tiers[self._tier.name] = wire.TierInfo(
                    capacity_bytes=self._tier.capacity_bytes,
                    used_bytes=self._state.tier.used_bytes,
                    read_bytes_per_s=self._read_meter.bytes_per_s(),
                    write_bytes_per_s=self._write_meter.bytes_per_s(),
                )
        return tiers

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        now_s = self._clock()
        with self._lock:
            state = self._state
            held = sum(not (entry.is_usable and entry.is_idle(now_s)) for entry in state.cpu)
            return dataclasses.replace(
                state.stats,
                events_dropped=state.events.untaken_dropped,
                cpu_used_bytes=len(state.cpu) * self._pool.slot_bytes,
                put_queue_bytes=state.puts.queued_bytes,
                cpu_held_bytes=held * self._pool.slot_bytes,
            )

    def check(self) -> None:
        """Raise AssertionError if the engine's state contradicts itself."""
        with self._lock:
            self._state.check()

    def close(self, *, drain_s: float = _DRAIN_S) -> None:
        """Write what is queued for disk (``drain_s`` at most) and end the I/O. Idempotent.

        Lets go of the pool's buffer, unless a thread hangs in the kernel.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._readers.stop()
        self._writers.stop()
        self._writers.join(drain_s)
        with self._lock:
            # Puts still queued now are dropped as soon as a thread sees them.
            self._draining = False
        ended = self._writers.join(_END_S) and self._readers.join(_END_S)
        self._tier.close()
        if ended:
            self._pool.close()
        else:
            logger.warning("the cache engine closed while I/O was still hanging")

    # --- decisions and what follows from them ---

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[Residency]:
        """Lend the state under the lock, then do what was decided, without it."""
        with self._lock:
            yield self._state
            todo = self._state.take_todo()
            listeners = tuple(self._listeners) if todo.has_news else ()
        self._start(todo)
        for listener in listeners:
            listener()

    def _start(self, todo: Todo) -> None:
        for entry in todo.gets:
            if not self._readers.submit(partial(self._get, entry)):
                self._get(entry)
        for entry in todo.puts:
            if not self._writers.submit(partial(self._put, entry)):
                self._drop_put(entry)
        for start in range(0, len(todo.deletes), _DELETE_BATCH):
            batch = todo.deletes[start : start + _DELETE_BATCH]
            if not self._writers.submit(partial(self._delete, batch)):
                self._delete(batch)
        for promotion, outcome, chunks in todo.settled:
            promotion.settle(outcome, chunks)

    def _get(self, entry: Entry) -> None:
        """Read a chunk into its slot; on a reader thread."""
        with self._lock:
            is_wanted = not self._closed
            self._read_meter.start(self._clock())
        outcome = self._read(entry) if is_wanted else GetOutcome.FAILED
        with self._deciding() as state:
            moved_bytes = self._pool.slot_bytes if outcome is GetOutcome.OK else 0
            self._read_meter.stop(self._clock(), moved_bytes)
            state.promotions.end(entry, outcome, self._clock())

    def _read(self, entry: Entry) -> GetOutcome:
        try:
            return self._tier.get(entry.key, self._pool.view(entry.slot))
        except Exception:  # a chunk left half-promoted would keep its slot for ever
            logger.exception("%s tier: get failed", self._tier.name)
            return GetOutcome.FAILED

    def _put(self, entry: Entry) -> None:
        """Write a chunk from its slot; on a writer thread."""
        with self._lock:
            is_wanted = self._draining
        if not is_wanted:
            self._drop_put(entry)
            return
        with self._deciding() as state:
            victims = state.puts.begin(entry, self._clock())
        if victims is None:
            return
        self._tier.delete(victims)
        with self._lock:
            self._state.puts.deleted(victims)
            self._write_meter.start(self._clock())
        outcome = self._write(entry)
        with self._deciding() as state:
            moved_bytes = self._pool.slot_bytes if outcome is PutOutcome.STORED else 0
            self._write_meter.stop(self._clock(), moved_bytes)
            state.puts.end(entry, outcome, self._clock())

    def _write(self, entry: Entry) -> PutOutcome:
        try:
            return self._tier.put(entry.key, self._pool.view(entry.slot))
        except Exception:  # a put that never ends would keep its slot for ever
            logger.exception("%s tier: put failed", self._tier.name)
            return PutOutcome.FAILED

    def _drop_put(self, entry: Entry) -> None:
        with self._deciding() as state:
            entry.put_wanted = False
            state.puts.begin(entry, self._clock())

    def _delete(self, keys: list[bytes]) -> None:
        """Delete cleared chunks below; on a writer thread."""
        self._tier.delete(keys)
        with self._lock:
            self._state.puts.deleted(keys)
