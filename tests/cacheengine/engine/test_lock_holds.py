"""No hold of the engine's lock does more than a bounded amount of work.

The engine has 100,000 chunks in the pool and a million on disk.

Counted are the calls, Python's own functions' included, and the bytes allocated: a step over all
that there is would be many calls or one large allocation. Times are for `bench.engine.holds`.
"""

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from bench.engine.index import FullTier, key_of, layout
from cacheengine.engine.engine import CacheEngine
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.helpers import FakeClock, ManualThreads, tier_stack

CHUNKS = 100_000
ON_DISK = 1_000_000
PINNED = 20_000
PROMPT = 400
MOST_CALLS = 10_000
"""Of 0.1 us or less each: within a millisecond or so."""
MOST_BYTES = 8_000_000
"""A list of the disk's keys is larger. A dictionary of the pool's keys that grows is smaller."""


class WatchedLock:
    """A lock that counts what is called, and how much is allocated, while it is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self.is_watching = False
        self.most_calls = 0
        self.most_bytes = 0

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self._calls += event in ("call", "c_call")

    def acquire(self) -> bool:
        self._lock.acquire()
        if self.is_watching:
            self._calls = 0
            self._before_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            sys.setprofile(self._count)
        return True

    def release(self) -> None:
        if self.is_watching:
            sys.setprofile(None)
            grown_bytes = tracemalloc.get_traced_memory()[1] - self._before_bytes
            self.most_bytes = max(self.most_bytes, grown_bytes)
            self.most_calls = max(self.most_calls, self._calls)
        self._lock.release()

    def watch(self, what: str, act: Callable[[], object]) -> None:
        """Do something, and see that no hold does too much."""
        self.most_calls = self.most_bytes = 0
        tracemalloc.start(1)
        self.is_watching = True
        act()
        self.is_watching = False
        tracemalloc.stop()
        assert 0 < self.most_calls <= MOST_CALLS, (what, self.most_calls)
        assert self.most_bytes <= MOST_BYTES, (what, self.most_bytes)


class Rig:
    """An engine with a full pool and a full disk."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = CacheEngine(
            EngineConfig(),
            layout(1),
            Pool.allocate(CHUNKS, 1),
            clock=self.clock,
            tier=FullTier(ON_DISK),
            make_threads=ManualThreads,
        )
        self.prompts = [
            [key_of(number) for number in range(start, start + PROMPT)]
            for start in range(0, CHUNKS, PROMPT)
        ]
        for prompt in self.prompts:
            self.engine.prepare_store(prompt)
            self.engine.complete_store(prompt)
        for prompt in self.prompts[: PINNED // PROMPT]:
            self.engine.promote(prompt, pin_s=10.0)
        # What is pinned is the least recent: it lies before all that may leave.
        for prompt in self.prompts[PINNED // PROMPT :]:
            self.engine.touch(prompt)
        self.lock = WatchedLock()
        self.engine._lock.lock = self.lock  # type: ignore[assignment]

    def run_jobs(self, most: int) -> None:
        """Do some of what the I/O threads have to do."""
        for io in tier_stack(self.engine).io:
            for threads in (io._readers, io._writers):
                assert isinstance(threads, ManualThreads)
                for _ in range(min(most, len(threads.jobs))):
                    threads.jobs.pop(0)()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.engine.close()


def _new(first: int, chunks: int = PROMPT) -> list[bytes]:
    return [key_of(ON_DISK + number) for number in range(first, first + chunks)]


@pytest.mark.slow
def test_no_hold_of_the_lock_does_more_with_more_chunks(rig: Rig) -> None:
    engine, watch, prompt = rig.engine, rig.lock.watch, rig.prompts[-1]
    below = [key_of(CHUNKS + number) for number in range(PROMPT)]
    watch("lookup", lambda: engine.lookup(prompt[0]))
    watch("hold", lambda: engine.hold(prompt))
    watch("release", lambda: engine.release(prompt))
    watch("touch", lambda: engine.touch(prompt))
    watch("match", lambda: engine.match(prompt))
    watch("pin", lambda: engine.pin(prompt, "cpu"))
    watch("unpin", lambda: engine.unpin(prompt, "cpu"))
    watch("pin on disk", lambda: engine.pin(prompt, "disk"))
    watch("store", lambda: engine.complete_store(engine.prepare_store(_new(0)).keys))  # type: ignore[union-attr]
    watch("promotion", lambda: engine.promote(below, pin_s=10.0))
    watch("reads, puts", lambda: rig.run_jobs(50))
    watch("clear of chunks", lambda: engine.clear(keys=prompt))
    watch("snapshot", engine.snapshot)
    watch("statistics", engine.stats)
    rig.clock.advance(20.0)
    watch("deadlines", engine.expire_pins)
    watch("clear of all", engine.clear)
    watch("slots and files given back", lambda: rig.run_jobs(50))
    watch("lookup of what was cleared", lambda: engine.lookup(rig.prompts[9][0]))
    watch("store after the clear", lambda: engine.prepare_store(_new(PROMPT)))
    watch("second clear", engine.clear)
    watch("events", lambda: engine.events_after(engine.last_seq - 100))
