"""The I/O of the tiers below the pool: their threads, their batches, and the tiers themselves.

Decisions are made under the engine's lock, a batch at a time; bytes move without it.
"""

import contextlib
import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from cacheengine.engine.engine_lock import EngineLock
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import CPU, BandwidthMeter
from cacheengine.residency.decisions import PORTION, PendingWork
from cacheengine.residency.local_index import LocalIndex
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import PoolEntry
from cacheengine.residency.shared_index import SharedIndex
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.infinistore_store import InfiniStore
from cacheengine.tiers.mooncake_store import MooncakeStore
from cacheengine.tiers.remote import SERDE_NAMES, RemoteTier, make_serde
from cacheengine.tiers.remote_url import RemoteUrl, parse_remote_url
from cacheengine.tiers.serde import Serde
from cacheengine.tiers.store import BlobStore, StoreError
from cacheengine.tiers.tier import (
    Chunk,
    GetOutcome,
    LocalTier,
    NullTier,
    PutOutcome,
    SharedTier,
    Tier,
)
from warmroute_common import agent_protocol as wire
from warmroute_common.config_reader import BadValueError, ConfigError

logger = logging.getLogger("vllm.warmroute")

A = TypeVar("A")
T = TypeVar("T")

Clock = Callable[[], float]

_REMOTE_READ_THREADS: Final = 4
_REMOTE_WRITE_THREADS: Final = 2
_DELETE_BATCH: Final = 64
_QUESTIONS_PER_CALL: Final = 4096
_LEAST_END_S: Final = 0.5
_SAVE_S: Final = 300.0
"""How often the order of a local tier's chunks is kept, while chunks are written."""
_NOBODYS_KEY: Final = hashlib.sha256(b"").digest()
"""Asked for to find out whether a server answers."""


class JobRunner(Protocol):
    """Runs the engine's I/O jobs. `IoThreads` says what the calls mean."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job."""

    def stop(self) -> None:
        """Take no more jobs."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after `stop`."""


class IoThreads:
    """``count`` threads that run jobs in the order given, until `stop`.

    Daemons: a read that hangs in the kernel must not keep a process from exiting. The queue has
    no bound of its own; its callers keep one.
    """

    def __init__(self, name: str, count: int) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; it should handle its own failures. False, queueing nothing, after `stop`."""
        # Against a `stop` in between: a job queued behind its marks would never run.
        with self._lock:
            if not self._stopped:
                self._jobs.put(job)
            return not self._stopped

    def stop(self) -> None:
        """Take no more jobs; the threads end after the queued ones. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after `stop`; False if some still run then."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # without its threads the tier would stop working, one by one
                logger.exception("a job of the cache engine's I/O threads failed")


MakeThreads = Callable[[str, int], JobRunner]


class TierIo:
    """Reads, writes and deletes of one tier, each kind queued and done in batches.

    Each path of a local tier has its own. ``queue_name`` is one of the index's queues.

    The I/O that was decided under ``lock`` comes back in `start`. `QueueJobs` does the batches.

    A tier's exception is a failure like any other: an entry whose read or write never ended would
    keep its slot for ever.
    """

    def __init__(
        self,
        tier: Tier,
        index: LowerIndex,
        queue_name: str,
        *,
        pool: Pool,
        config: EngineConfig,
        lock: EngineLock,
        clock: Clock,
        make_threads: MakeThreads,
    ) -> None:
        self._tier = tier
        self.index = index
        self.name = queue_name
        self._pool = pool
        self._lock = lock
        self._clock = clock
        is_shared = isinstance(tier, SharedTier)
        self._read_threads = _REMOTE_READ_THREADS if is_shared else config.disk_read_threads
        self._write_threads = _REMOTE_WRITE_THREADS if is_shared else config.disk_write_threads
        # These change under the engine's lock only: a batch is taken and counted, and the decision
        # whether to do it still is made, in one step.
        self.is_writing = True
        """False: puts not begun yet are dropped."""
        self._being_written = 0
        self._save_at_s = clock() + _SAVE_S
        self._write_meter = BandwidthMeter()
        self._readers = make_threads(f"kv-get-{self.name}", self._read_threads)
        self._writers = make_threads(f"kv-put-{self.name}", self._write_threads)
        self._reads = QueueJobs(self._readers, self._read_threads, self._read_batch)
        self._writes = QueueJobs(self._writers, self._write_threads, self._write_batch)
        # Questions have a thread of their own, since requests wait for them: they do not queue
        # behind reads. And one thread only, so that all that come up while it asks go in its next
        # call.
        self._asker = make_threads(f"kv-find-{self.name}", 1) if is_shared else None

    @property
    def meters(self) -> tuple[BandwidthMeter, BandwidthMeter]:
        """Those of reads and of writes, under the engine's lock."""
        return self._lock.decider.promoter.reads[self.name].meter, self._write_meter

    def start(
        self,
        gets: int,
        puts: int,
        deletes: Sequence[bytes],
        *,
        has_questions: bool,
        is_cleared: bool,
    ) -> None:
        """Start the I/O that was decided; the numbers count what was newly queued."""
        if gets:
            self._reads.start(gets)
        if puts:
            self._writes.start(puts)
        for start in range(0, len(deletes), _DELETE_BATCH):
            _run(self._writers, partial(self._delete, deletes[start : start + _DELETE_BATCH]))
        if is_cleared:
            _run(self._writers, partial(_take_turns, self._writers, self._delete_cleared))
        if has_questions and self._asker is not None:
            _run(self._asker, self._ask_turn)

    # --- the end ---

    def stop(self) -> None:
        """Take no more jobs."""
        for threads in (self._readers, self._writers, self._asker):
            if threads is not None:
                threads.stop()

    def join_writers(self, timeout_s: float) -> bool:
        """Wait until all queued puts are written; False if some are not."""
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
        """Read the next batch of the queue; return whether to look for another."""
        with self._lock as decider:
            reads = decider.promoter.reads[self.name]
            if self.index.is_suspended(self.name):
                decider.promoter.give_up(self.index, self.name, self._clock())
                return self._reads.goes_on(reads.waiting)
            share = self._share(reads.waiting + reads.begun, self._read_threads)
            entries = decider.promoter.take(self.name, share, self._clock())
            if not entries:
                return self._reads.goes_on(0)
        outcomes = self._move(self._tier.get_many, entries) or [GetOutcome.FAILED] * len(entries)
        with self._lock as decider:
            decider.promoter.end(self.index, entries, outcomes, self._clock())
            return self._reads.goes_on(reads.waiting)

    def _move(
        self, call: Callable[[list[Chunk]], list[T]], entries: Sequence[PoolEntry]
    ) -> list[T]:
        """Have the tier read or write entries; return how each ended, [] if the call failed."""
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
        """Return how many chunks one thread takes: spread over the threads first, then batched."""
        return min(self._tier.batch_chunks, math.ceil(chunks / threads))

    # --- writes ---

    def _write_batch(self) -> bool:
        """Write the next batch of the queue; return whether to look for another."""
        with self._lock as decider:
            puts = decider.cascades[self.name]
            if not self.is_writing:
                puts.cancel()
            share = self._share(puts.waiting + self._being_written, self._write_threads)
            entries, victims = puts.begin(share, self._clock())
            if not entries:
                # It was empty, or a portion of it was dropped.
                return self._writes.goes_on(puts.waiting)
            self._being_written += len(entries)
        if victims:
            self._delete(victims)
        with self._lock:
            self._write_meter.start(self._clock())
        outcomes = self._move(self._tier.put_many, entries) or [PutOutcome.FAILED] * len(entries)
        with self._lock as decider:
            now_s = self._clock()
            self._write_meter.stop(now_s, outcomes.count(PutOutcome.STORED) * self._pool.slot_bytes)
            self._being_written -= len(entries)
            puts.end(entries, outcomes, now_s)
            must_save = now_s >= self._save_at_s
            if must_save:
                self._save_at_s = now_s + _SAVE_S
            goes_on = self._writes.goes_on(puts.waiting)
        if must_save:
            self.save_order(is_final=False)
        return goes_on

    def save_order(self, *, is_final: bool) -> None:
        """Have a local tier keep the order of its chunks for the next start."""
        if not isinstance(self._tier, LocalTier) or not isinstance(self.index, LocalIndex):
            return
        with self._lock:
            # Chunks that were cleared and are not deleted yet must not be there after a restart.
            keys = self.index.keys() if is_final else self.index.order()
        try:
            self._tier.save(keys, self.index.queues.index(self.name), is_final=is_final)
        except Exception:
            logger.exception("%s tier: its index was not written", self.name)

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Delete chunks, then note that they are gone. On a writer thread."""
        try:
            self._tier.delete(keys)
        except Exception:
            logger.exception("%s tier: delete failed", self.name)
        with self._lock as decider:
            decider.cascades[self.name].deleted(keys)

    def _delete_cleared(self) -> bool:
        """Delete a portion of the chunks of a cleared tier; return whether there are more."""
        with self._lock as decider:
            keys, is_more = decider.state.take_cleared(self.index, PORTION)
            # By the threads of their paths, which come before the next portion.
            decider.state.delete(self.index, keys)
        return is_more

    def free_cleared_slots(self) -> None:
        """Free the slots of a pool that was cleared, on a writer thread."""

        def free() -> bool:
            with self._lock as decider:
                is_more = decider.state.remove_cleared(PORTION)
            # A thread that waits for the engine's lock needs the interpreter's lock (GIL), too.
            time.sleep(0)
            return is_more

        _run(self._writers, partial(_take_turns, self._writers, free))

    # --- questions ---

    def _ask_turn(self) -> None:
        """Ask in one call for everything that has come up since the last call."""
        assert isinstance(self._tier, SharedTier) and isinstance(self.index, SharedIndex)
        with self._lock:
            must_ping = self.index.take_ping() and not self.index.is_closed
        if must_ping:
            is_answered = bool(self._answers(self._tier.find, [_NOBODYS_KEY]))
            with self._lock:
                self.index.pinged(is_answered=is_answered)
        with self._lock as decider:
            keys = decider.promotions.take_questions(_QUESTIONS_PER_CALL)
            is_wanted = not self.index.is_suspended(self.name)
        while keys:
            found = self._answers(self._tier.find, keys) if is_wanted else []
            self._note_answers(keys, found)
            with self._lock as decider:
                keys = decider.promotions.take_questions(_QUESTIONS_PER_CALL)
                is_wanted = not self.index.is_suspended(self.name)

    def _note_answers(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Note all answers, then advance the promotions that waited for one; a portion at a time.

        Between portions other threads may ask for a chunk whose answer is noted later: they wait
        for that.
        """
        for start in range(0, len(keys), PORTION):
            part = slice(start, start + PORTION)
            with self._lock as decider:
                now_s = self._clock()
                decider.promotions.answered(keys[part], found[part] or None, now_s)
                assert isinstance(self.index, SharedIndex)
                decider.cascades[self.name].put_again(self.index.take_lost(), now_s)
        is_more = True
        while is_more:
            with self._lock as decider:
                is_more = decider.promotions.advance_answered(self._clock())


def _run(threads: JobRunner, job: Callable[[], None]) -> None:
    """Have a thread do a job; after the threads have stopped, do it on this one."""
    if not threads.submit(job):
        job()


def _take_turns(threads: JobRunner, batch: Callable[[], bool]) -> None:
    """Do a batch, and queue a job for the rest behind the other jobs."""
    while batch() and not threads.submit(partial(_take_turns, threads, batch)):
        pass  # stopped: no other thread will do the rest


class QueueJobs:
    """The jobs that do a queue's batches in turns, no more of them than ``most`` threads.

    A batch looks at the queue under the engine's lock, and calls `goes_on` in the same hold. So
    what is queued later finds a job that still looks, or starts one.
    """

    def __init__(self, threads: JobRunner, most: int, batch: Callable[[], bool]) -> None:
        self._threads = threads
        self._most = most
        self._batch = batch
        self._lock = threading.Lock()
        self._running = 0

    def start(self, queued: int) -> None:
        """Have what was queued done; to be called after the engine's lock was released."""
        with self._lock:
            new = min(queued, self._most - self._running)
            self._running += new
        for _ in range(new):
            _run(self._threads, partial(_take_turns, self._threads, self._turn))

    def goes_on(self, waiting: int) -> bool:
        """Return whether a job's next turn comes; without one it has ended."""
        if not waiting:
            with self._lock:
                self._running -= 1
        return waiting > 0

    def _turn(self) -> bool:
        try:
            return self._batch()
        except BaseException:
            self.goes_on(0)
            raise


class TierStack:
    """The local tier and the remote tier, if there is one; by default those of the configuration.

    The constructor scans the local tier and starts the threads.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        pool: Pool,
        local: LocalTier | None,
        remote: SharedTier | None,
        *,
        lock: EngineLock,
        clock: Clock,
        make_threads: MakeThreads,
    ) -> None:
        self._lock = lock
        with contextlib.ExitStack() as undo:
            self.local = make_tier(config, layout) if local is None else local
            undo.callback(self.local.close)
            self.remote = make_remote(config, layout) if remote is None else remote
            if self.remote is not None:
                undo.callback(self.remote.close)
            below: list[tuple[Tier, LowerIndex]] = [
                (self.local, _index_of_stored(self.local, config.cache_policy))
            ]
            undo.pop_all()
        if self.remote is not None:
            below.append((self.remote, SharedIndex()))
        self.indexes = [index for _, index in below]
        """The nearest tier's first."""
        make_io = partial(
            TierIo, pool=pool, config=config, lock=lock, clock=clock, make_threads=make_threads
        )
        self.io = [make_io(tier, index, each) for tier, index in below for each in index.queues]

    def start(self, work: PendingWork) -> None:
        """Start the reads, writes, deletes and questions that were decided."""
        for io in self.io:
            io.start(
                work.gets[io.name],
                work.puts[io.name],
                work.deletes.get(io.name, ()),
                has_questions=work.has_questions,
                is_cleared=io.index.name in work.clears,
            )
        for io in self.io if CPU in work.clears else ():
            io.free_cleared_slots()

    def info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is, under the engine's lock."""
        return {index.name: self._info(index) for index in self.indexes if index.is_there}

    def _info(self, index: LowerIndex) -> wire.TierInfo:
        meters = [io.meters for io in self.io if io.index is index]
        return wire.TierInfo(
            capacity_bytes=index.capacity_bytes,
            used_bytes=index.used_bytes,
            read_bytes_per_s=sum(reads.bytes_per_s() for reads, _ in meters),
            read_bytes=sum(reads.total_bytes for reads, _ in meters),
            write_bytes_per_s=sum(writes.bytes_per_s() for _, writes in meters),
        )

    def close(self, drain_s: float) -> bool:
        """Write queued puts for at most ``drain_s``, end the I/O; False if a thread still hangs.

        Waits half as long again for I/O that has begun, and to keep the order of what is on disk.
        """
        ends_s = time.monotonic() + drain_s + max(_LEAST_END_S, drain_s / 2)
        with self._lock:
            for io in self.io:
                # Reads not begun are given up, and questions are not asked.
                io.index.is_closed = True
        for io in self.io:
            io.stop()
        self._join(TierIo.join_writers, drain_s)
        with self._lock:
            # Puts still queued now are dropped as soon as a thread sees them.
            for io in self.io:
                io.is_writing = False
        if self.remote is not None:
            # Before its threads end: calls that wait for its server fail now.
            self.remote.close()
        ended = self._join(TierIo.join, ends_s - time.monotonic())
        # On a thread, since an idle disk may hang, too.
        last = IoThreads("kv-end", 1)
        last.submit(partial(self._end_local, saves=ended))
        last.stop()
        last.join(ends_s - time.monotonic())
        return ended

    def _end_local(self, *, saves: bool) -> None:
        for io in self.io if saves else ():
            io.save_order(is_final=True)
        self.local.close()

    def _join(self, join: Callable[[TierIo, float], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended = [join(io, max(0.0, deadline_s - time.monotonic())) for io in self.io]
        return all(ended)


def _index_of_stored(local: LocalTier, policy: str) -> LocalIndex:
    """Return an index of the chunks that an earlier run has stored, as far as they fit."""
    index = LocalIndex(
        local.capacity_bytes,
        local.item_bytes,
        policy=policy,
        paths=local.paths,
        path_of=local.path_of,
    )
    keys = local.scan()
    excess = index.adopt(keys)
    local.delete(excess)
    for key in excess:
        index.forget(key)
    if keys:
        logger.info(
            "%s tier: %d chunks of an earlier run are served again, %d did not fit",
            local.name,
            len(index),
            len(excess),
        )
    return index


def make_tier(config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    """Return the local tier of the configuration.

    Raises `ConfigError` for a limit below one chunk, OSError for a directory that cannot be used
    or that another process uses.
    """
    if not config.local_disk:
        return NullTier()
    tier = DiskTier(
        config.local_disk,
        layout.fingerprint(),
        payload_bytes=layout.chunk_bytes,
        capacity_bytes=config.max_local_disk_bytes,
        direct=config.disk_direct_io,
    )
    if tier.capacity_bytes < tier.item_bytes:
        tier.close()
        raise ConfigError(
            config.source,
            "max_local_disk_size",
            f"{config.max_local_disk_size} GB is smaller than one chunk ({tier.item_bytes} bytes)",
            f"set at least {2 * tier.item_bytes / 1024**3:.3g}",
        )
    return tier


def make_remote(config: EngineConfig, layout: ChunkLayout) -> SharedTier | None:
    """Return the remote tier of the configuration, if any.

    A server that cannot be reached now causes a warning: its chunks are misses until it can.
    Raises `ConfigError` for a setting that only a person can fix.
    """
    if not config.remote_url:
        return None
    config.check_remote_ready()
    url = parse_remote_url(config.remote_url)
    try:
        store = _connect(url, config.remote_url, config)
    except BadValueError as error:
        raise ConfigError(config.source, "remote_url", error.problem, error.fix) from None
    except StoreError as error:
        fix = "correct it, or remove remote_url"
        raise ConfigError(config.source, "remote_url", f"{url} {error}", fix) from None
    try:
        serde = make_serde(config.remote_serde, layout.dtype)
    except ValueError as error:
        fix = "choose another remote_serde"
        raise ConfigError(config.source, "remote_serde", str(error), fix) from None
    tier = RemoteTier(
        store,
        layout.fingerprint(),
        layout.chunk_bytes,
        serde,
        readers=_exact_serdes(layout.dtype),
        server=str(url),
        secret=config.fleet_secret,
    )
    # So that a server that is down, or a wrong password, is logged now, not at the first request.
    if tier.find([_NOBODYS_KEY]) is not None:
        logger.info("remote tier: %s answers, %s", url, serde.name)
    return tier


def _connect(url: RemoteUrl, text: str, config: EngineConfig) -> BlobStore:
    # valkey-py is slow to import, and most engines need none of it.
    from cacheengine.tiers.redis_cluster import open_redis  # noqa: PLC0415
    from cacheengine.tiers.redis_store import REDIS_SCHEMES, RedisServer  # noqa: PLC0415

    if url.scheme in REDIS_SCHEMES:
        return open_redis(RedisServer.from_url(url, ttl_s=config.remote_ttl))
    store = MooncakeStore if url.scheme == "mooncakestore" else InfiniStore
    return store.connect(text, config.extra_config)


def _exact_serdes(dtype: str) -> list[Serde]:
    """Return the serdes of chunks that replicas with other settings have stored."""
    made = []
    for name in SERDE_NAMES:
        try:
            made.append(make_serde(name, dtype))
        except ValueError:
            continue  # it cannot encode this type, so nothing was encoded by it
    return [serde for serde in made if serde.is_exact]
