"""The I/O of one lower tier: its threads, its batches, its measured speed.

Decisions are taken under the engine's lock, a batch at a time; bytes move
without it. A tier's exception is a failure like any other: an entry whose
read or write never ended would keep its slot for ever.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeVar

from cacheengine.engine.io_threads import JobRunner
from cacheengine.memory import Pool
from cacheengine.record import BandwidthMeter
from cacheengine.residency import PORTION, Decider, Entry, LowerIndex
from cacheengine.settings import EngineConfig
from cacheengine.tiers import Chunk, GetOutcome, PutOutcome, SharedTier, Tier
from warmroute_common import agent_protocol as wire

logger = logging.getLogger("vllm.warmroute")

A = TypeVar("A")
T = TypeVar("T")

Clock = Callable[[], float]
Lend = Callable[[], AbstractContextManager[Decider]]
MakeThreads = Callable[[str, int], JobRunner]

_REMOTE_READ_THREADS: Final = 4
_REMOTE_WRITE_THREADS: Final = 2
_DELETE_BATCH: Final = 64
_QUESTIONS_PER_CALL: Final = 4096


class TierIo:
    """Reads, writes and deletes of one tier, each kind queued and done in batches.

    ``deciding`` lends the engine's decisions under its lock; what they then
    ask for comes back in `start`. A job takes from a queue what it finds there,
    and the queue gets a job with every addition, so nothing waits in it for
    ever, and a job that finds nothing is over.
    """

    def __init__(
        self,
        tier: Tier,
        index: LowerIndex,
        pool: Pool,
        *,
        config: EngineConfig,
        deciding: Lend,
        clock: Clock,
        make_threads: MakeThreads,
    ) -> None:
        self._tier = tier
        self.index = index
        self.name = index.name
        self._pool = pool
        self._deciding = deciding
        self._clock = clock
        is_shared = isinstance(tier, SharedTier)
        self._read_threads = _REMOTE_READ_THREADS if is_shared else config.disk_read_threads
        self._write_threads = _REMOTE_WRITE_THREADS if is_shared else config.disk_write_threads
        # These change under the engine's lock only: a batch is taken, counted,
        # and the decision whether to do it still is made, in one step.
        self.is_reading = True
        """False: reads not begun yet are given up, questions not asked."""
        self.is_writing = True
        """False: puts not begun yet are dropped."""
        self._being_read = 0
        self._being_written = 0
        self._read_meter = BandwidthMeter()
        self._write_meter = BandwidthMeter()
        self._readers = make_threads(f"kv-get-{self.name}", self._read_threads)
        self._writers = make_threads(f"kv-put-{self.name}", self._write_threads)
        # A thread of its own, so that questions, which requests wait for, do
        # not queue behind reads; and one only, so that all that come up while
        # it asks go in its next call.
        self._asker = make_threads(f"kv-find-{self.name}", 1) if is_shared else None

    def info(self) -> wire.TierInfo:
        """Return the tier's size and speed, under the engine's lock."""
        return wire.TierInfo(
            capacity_bytes=self.index.capacity_bytes,
            used_bytes=self.index.used_bytes,
            read_bytes_per_s=self._read_meter.bytes_per_s(),
            write_bytes_per_s=self._write_meter.bytes_per_s(),
        )

    def start(
        self, gets: int, puts: int, deletes: Sequence[bytes], *, asks: bool, clears: bool
    ) -> None:
        """Do what was decided; the numbers are of those newly queued."""
        for _ in range(min(gets, self._read_threads)):
            _run(self._readers, partial(_take_turns, self._readers, self._read_batch))
        for _ in range(min(puts, self._write_threads)):
            _run(self._writers, partial(_take_turns, self._writers, self._write_batch))
        for start in range(0, len(deletes), _DELETE_BATCH):
            _run(self._writers, partial(self._delete, deletes[start : start + _DELETE_BATCH]))
        if clears:
            _run(self._writers, partial(_take_turns, self._writers, self._delete_cleared))
        if asks and self._asker is not None:
            _run(self._asker, self._ask_turn)

    # --- the end ---

    def stop(self) -> None:
        """Take no more jobs."""
        for threads in (self._readers, self._writers, self._asker):
            if threads is not None:
                threads.stop()

    def join_writers(self, timeout_s: float) -> bool:
        """Wait until what is queued is written; False if it is not."""
        return self._writers.join(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all threads; False if some still run."""
        deadline_s = time.monotonic() + timeout_s
        ended = True
        for threads in (self._writers, self._readers, self._asker):
            if threads is not None:
                ended = threads.join(max(0.0, deadline_s - time.monotonic())) and ended
        return ended

    # --- reads ---

    def _read_batch(self) -> bool:
        """Read what is next in the queue; return whether more was there."""
        with self._deciding() as decider:
            queued = decider.promoter.waiting(self.name)
            share = self._share(queued + self._being_read, self._read_threads)
            entries = decider.promoter.take(self.name, share)
            if not entries:
                return False
            is_more = queued > len(entries)
            if not self.is_reading:
                decider.promoter.give_up(self.index, entries, self._clock())
                return is_more
            self._being_read += len(entries)
            self._read_meter.start(self._clock())
        outcomes = self._move(self._tier.get_many, entries) or [GetOutcome.FAILED] * len(entries)
        with self._deciding() as decider:
            now_s = self._clock()
            self._read_meter.stop(now_s, outcomes.count(GetOutcome.OK) * self._pool.slot_bytes)
            self._being_read -= len(entries)
            decider.promoter.end(self.index, entries, outcomes, now_s)
        return is_more

    def _move(self, call: Callable[[list[Chunk]], list[T]], entries: Sequence[Entry]) -> list[T]:
        """Have the tier read or write entries; how each ended, nothing if the call failed."""
        return self._answers(call, [(each.key, self._pool.view(each.slot)) for each in entries])

    def _answers(self, call: Callable[[list[A]], list[T] | None], asked: list[A]) -> list[T]:
        try:
            answers = call(asked)
        except Exception:
            logger.exception("%s tier: %s failed", self.name, call.__name__)
            return []
        if answers is not None and len(answers) != len(asked):
            logger.error("%s tier: %d answers to %d", self.name, len(answers), len(asked))
            return []
        return answers or []

    def _share(self, chunks: int, threads: int) -> int:
        """How many of those queued or under way one thread takes: spread first, then batched."""
        return min(self._tier.batch_chunks, math.ceil(chunks / threads))

    # --- writes ---

    def _write_batch(self) -> bool:
        """Write what is next in the queue; return whether more was there."""
        with self._deciding() as decider:
            puts = decider.cascades[self.name]
            if not self.is_writing:
                puts.cancel()
            share = self._share(puts.waiting + self._being_written, self._write_threads)
            entries, victims = puts.begin(share, self._clock())
            if not entries:
                return puts.waiting > 0  # it was empty, or many in it were dropped
            self._being_written += len(entries)
            is_more = puts.waiting > 0
        if victims:
            self._delete(victims)
        with self._deciding():
            self._write_meter.start(self._clock())
        outcomes = self._move(self._tier.put_many, entries) or [PutOutcome.FAILED] * len(entries)
        with self._deciding() as decider:
            now_s = self._clock()
            self._write_meter.stop(now_s, outcomes.count(PutOutcome.STORED) * self._pool.slot_bytes)
            self._being_written -= len(entries)
            decider.cascades[self.name].end(entries, outcomes, now_s)
        return is_more

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Delete chunks, and note that they are gone; on a writer thread."""
        try:
            self._tier.delete(keys)
        except Exception:
            logger.exception("%s tier: delete failed", self.name)
        with self._deciding() as decider:
            decider.cascades[self.name].deleted(keys)

    def _delete_cleared(self) -> bool:
        """Delete a portion of what was cleared with the whole tier; return if there is more."""
        with self._deciding() as decider:
            keys, is_more = decider.take_cleared(self.name)
        if keys:
            self._delete(keys)
        return is_more

    def free_cleared(self) -> None:
        """Free the slots of a pool that was cleared, on a writer thread."""

        def free() -> bool:
            with self._deciding() as decider:
                is_more = decider.free_cleared()
            # A thread that waits for the lock needs Python's own, too, while this one has none.
            time.sleep(0)
            return is_more

        _run(self._writers, partial(_take_turns, self._writers, free))

    # --- questions ---

    def _ask_turn(self) -> None:
        """Ask in one call for all that has come up since the last."""
        assert isinstance(self._tier, SharedTier)
        with self._deciding() as decider:
            keys = decider.walks.take_questions(_QUESTIONS_PER_CALL)
            is_wanted = self.is_reading
        while keys:
            found = self._answers(self._tier.find, keys) if is_wanted else []
            self._note_answers(keys, found)
            with self._deciding() as decider:
                keys = decider.walks.take_questions(_QUESTIONS_PER_CALL)
                is_wanted = self.is_reading

    def _note_answers(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Note all answers, then go on with what waited for one of them; a portion at a time.

        In between others may ask for a chunk that is answered later: they wait for that.
        """
        for start in range(0, len(keys), PORTION):
            part = slice(start, start + PORTION)
            with self._deciding() as decider:
                decider.walks.answered(keys[part], found[part] or None, self._clock())
        is_more = True
        while is_more:
            with self._deciding() as decider:
                is_more = decider.walks.go_on_answered(self._clock())


def _run(threads: JobRunner, job: Callable[[], None]) -> None:
    """Have a thread do a job, or after their end this one."""
    if not threads.submit(job):
        job()


def _take_turns(threads: JobRunner, batch: Callable[[], bool]) -> None:
    """Do a batch, and see to it that the rest of the queue has its turn."""
    while batch() and not threads.submit(partial(_take_turns, threads, batch)):
        pass  # stopped: this thread is the last that comes here
