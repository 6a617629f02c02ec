"""A lock that measures how long it is held and waited for, and by which call.

Each end takes two readings of the clock and one of the thread's CPU time: about 2 us a hold, of
which less than 1 us lies within the hold. By the clock a hold takes what its thread computes, and
what the thread waits for meanwhile: a core, the interpreter's lock (GIL), anything else. Its CPU
time is what it computes alone.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Self, cast

from cacheengine.engine.engine import CacheEngine

LONG_NS: Final = 1_000_000
"""No hold should take longer."""
_STEPS: Final = 4
"""Bits of a duration that a bucket keeps: its upper end is 6% above its lower end."""
_OUTSIDE: Final = ("measured_lock.py", "engine_lock.py")
"""Files of functions that hold the lock for their caller."""


def bucket(duration_ns: int) -> int:
    """Return the smallest upper end of a bucket that is not below a duration."""
    shift = max(0, duration_ns.bit_length() - _STEPS - 1)
    return -(-duration_ns >> shift) << shift


@dataclass(kw_only=True)
class Durations:
    """Durations, counted in buckets."""

    counts: Counter[int] = field(default_factory=Counter)
    """By the upper end in nanoseconds."""
    longest_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one."""
        self.counts[bucket(duration_ns)] += 1
        self.longest_ns = max(self.longest_ns, duration_ns)

    def quantile_ns(self, share: float) -> int:
        """Return the quantile, up to a bucket's 6% too high; 0 if there are none."""
        left = share * self.counts.total()
        for upper_ns in sorted(self.counts):
            left -= self.counts[upper_ns]
            if left <= 0:
                return min(upper_ns, self.longest_ns)
        return self.longest_ns

    def merge(self, other: "Durations") -> None:
        """Add another's counts."""
        self.counts.update(other.counts)
        self.longest_ns = max(self.longest_ns, other.longest_ns)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"counts": dict(self.counts), "longest_ns": self.longest_ns}

    @classmethod
    def from_json(cls, counted: Mapping[str, Any]) -> Self:
        """Read what `to_json` has made, also where keys have become text."""
        counts = Counter({int(upper): int(count) for upper, count in counted["counts"].items()})
        return cls(counts=counts, longest_ns=int(counted["longest_ns"]))


@dataclass(kw_only=True)
class LongHolds:
    """The holds of one call that were longer than `LONG_NS`, or its longest."""

    count: int = 0
    longest_ns: int = 0
    cpu_ns: int = 0
    """What the thread computed during the longest."""


class MeasuredLock:
    """A `threading.Lock` that measures; only `EngineLock` uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held_from_ns = 0
        self._held_from_cpu_ns = 0
        self.held = Durations()
        """By the clock."""
        self.computed = Durations()
        """CPU time of the holder's thread during the hold."""
        self.waited = Durations()
        """By all threads but the main one."""
        self.waited_by_main = Durations()
        """By the process's main thread: the scheduler's."""
        self._main = threading.main_thread().ident
        self.by_call: dict[str, LongHolds] = {}
        """Which calls have held it for more than a tenth of `LONG_NS`."""

    def acquire(self) -> bool:
        """Acquire the lock, and note how long that took."""
        asked_ns = time.perf_counter_ns()
        self._lock.acquire()
        cpu_ns = time.thread_time_ns()
        now_ns = time.perf_counter_ns()
        is_main = threading.get_ident() == self._main
        (self.waited_by_main if is_main else self.waited).add(now_ns - asked_ns)
        self._held_from_cpu_ns = cpu_ns
        self._held_from_ns = time.perf_counter_ns()
        return True

    def release(self) -> None:
        """Release the lock, and note how long it was held."""
        held_ns = time.perf_counter_ns() - self._held_from_ns
        cpu_ns = time.thread_time_ns() - self._held_from_cpu_ns
        self.held.add(held_ns)
        self.computed.add(cpu_ns)
        if held_ns > LONG_NS // 10:
            self._note(_caller(sys._getframe(1)), held_ns, cpu_ns)
        self._lock.release()

    def _note(self, call: str, held_ns: int, cpu_ns: int) -> None:
        noted = self.by_call.setdefault(call, LongHolds())
        noted.count += held_ns > LONG_NS
        if held_ns > noted.longest_ns:
            noted.longest_ns, noted.cpu_ns = held_ns, cpu_ns

    def to_json(self) -> dict[str, Any]:
        """Return all measurements, ready for JSON."""
        with self._lock:
            return {
                "held": self.held.to_json(),
                "computed": self.computed.to_json(),
                "waited": self.waited.to_json(),
                "waited_by_main": self.waited_by_main.to_json(),
                "by_call": {
                    call: [each.count, each.longest_ns, each.cpu_ns]
                    for call, each in self.by_call.items()
                },
            }


def _caller(frame: FrameType | None) -> str:
    """Return the function that holds the lock, where another function takes it for it."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.endswith(_OUTSIDE):
            return code.co_qualname
        frame = frame.f_back
    return "?"


def measure_lock(engine: CacheEngine) -> MeasuredLock:
    """Make an engine that nothing calls yet use a measured lock from now on."""
    lock = MeasuredLock()
    engine._lock.lock = cast("threading.Lock", lock)
    return lock


@dataclass(kw_only=True)
class Holds:
    """The holds of all engines' locks."""

    held: Durations = field(default_factory=Durations)
    computed: Durations = field(default_factory=Durations)
    waited: Durations = field(default_factory=Durations)
    waited_by_main: Durations = field(default_factory=Durations)
    by_call: dict[str, LongHolds] = field(default_factory=dict)

    def add(self, measured: Mapping[str, Any]) -> None:
        """Add what one process has measured (`MeasuredLock.to_json`)."""
        for name in ("held", "computed", "waited", "waited_by_main"):
            getattr(self, name).merge(Durations.from_json(measured[name]))
        for call, (count, longest_ns, cpu_ns) in measured["by_call"].items():
            noted = self.by_call.setdefault(call, LongHolds())
            noted.count += count
            if longest_ns > noted.longest_ns:
                noted.longest_ns, noted.cpu_ns = longest_ns, cpu_ns

    @property
    def longest_call(self) -> str:
        """The call that held a lock longest."""
        return max(self.by_call, key=lambda call: self.by_call[call].longest_ns, default="none")
