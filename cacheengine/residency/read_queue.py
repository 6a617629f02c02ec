"""The reads of one tier: in which order they begin, how fast they end, when each is expected. Pure.

Reads that a request waits for begin before all others (prefetches, chunks for other replicas).
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice
from math import inf
from typing import Final

from cacheengine.record import BandwidthMeter
from cacheengine.residency.pool_index import PoolEntry
from cacheengine.tiers.store import SLOWEST_BYTES_S

_QUIET_S: Final = 0.25
"""Reads may end this long after one another without anything being wrong."""
_FRESH_S: Final = 10.0
"""How long a measured speed is believed."""
_STUCK_S: Final = 5.0
"""A tier with a read under way for longer hangs; a large chunk gets more."""


class ReadQueue:
    """Reads from being queued to their end, each of ``chunk_bytes``.

    The speed is measured while at least one read is queued or under way: it is the speed at which
    the queue becomes shorter.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.meter = BandwidthMeter()
        self._chunk_bytes = chunk_bytes
        self._stuck_s = _STUCK_S + chunk_bytes / SLOWEST_BYTES_S
        # With their numbers in the order of queueing. Cancelled ones leave a gap.
        self._demand: OrderedDict[bytes, tuple[int, PoolEntry]] = OrderedDict()
        self._others: OrderedDict[bytes, PoolEntry] = OrderedDict()
        self._last = 0
        # Since when, the oldest first.
        self._begun: dict[bytes, float] = {}
        # When the last read ended; of an idle queue, when it became busy.
        self._moved_s = -inf
        self._ended_s = -inf

    def __contains__(self, key: bytes) -> bool:
        return key in self._begun or key in self._demand or key in self._others

    @property
    def waiting(self) -> int:
        return len(self._demand) + len(self._others)

    @property
    def begun(self) -> int:
        return len(self._begun)

    def is_waiting(self, key: bytes) -> bool:
        """Whether a chunk's read is queued and has not begun."""
        return key in self._demand or key in self._others

    # --- the order ---

    def add(self, entry: PoolEntry, now_s: float, *, is_demand: bool) -> None:
        if not (self._begun or self._others or self._demand):
            self._moved_s = now_s
        self.meter.start(now_s)
        if is_demand:
            self._demand[entry.key] = (self._next_number(), entry)
        else:
            self._others[entry.key] = entry

    def hurry(self, key: bytes) -> None:
        """Have a read begin before all reads that no request waits for, unless it has begun."""
        entry = self._others.pop(key, None)
        if entry is not None:
            self._demand[key] = (self._next_number(), entry)

    def _next_number(self) -> int:
        self._last += 1
        return self._last

    def take(self, most: int, now_s: float) -> list[PoolEntry]:
        """Begin at most ``most`` reads; `end` must follow for each."""
        taken = self.first(most)
        for entry in taken:
            if self._demand.pop(entry.key, None) is None:
                del self._others[entry.key]
            self._begun[entry.key] = now_s
        return taken

    def end(self, entries: Sequence[PoolEntry], now_s: float, moved_bytes: int) -> None:
        """Note that reads have ended, and how many bytes they brought together."""
        for entry in entries:
            del self._begun[entry.key]
        self._moved_s = self._ended_s = now_s
        self.meter.stop(now_s, moved_bytes, len(entries))

    def cancel(self, key: bytes, now_s: float) -> None:
        """Drop a read that has not begun."""
        if self._demand.pop(key, None) is None:
            del self._others[key]
        self.meter.stop(now_s, 0)

    def first(self, most: int) -> list[PoolEntry]:
        """Return at most ``most`` reads that have not begun."""
        demand = (entry for _, entry in self._demand.values())
        return [*islice(chain(demand, self._others.values()), most)]

    # --- when they come ---

    def number(self, key: bytes) -> int | None:
        """Return the number of a read for `arrival_s`; None if no request waits for it yet."""
        if key in self._others:
            return None
        return self._demand[key][0] if key in self._demand else 0

    def arrival_s(self, number: int, now_s: float) -> float:
        """Return in how many seconds the read of this number is expected to end."""
        return self._after_s(max(0, number - self._first + 1), now_s)

    def backlog_s(self, more: int, now_s: float) -> float:
        """Return in how many seconds ``more`` reads would end that requests queue now."""
        return self._after_s(self._last - self._first + 1 + more, now_s)

    @property
    def _first(self) -> int:
        return next(iter(self._demand.values()))[0] if self._demand else self._last + 1

    def _after_s(self, chunks: int, now_s: float) -> float:
        """Return when this many of the queued reads are expected to have ended.

        A queue that has not moved for a while is expected to stand still for as long again, one
        that hangs for ever. While nothing was measured, everything is expected at once.
        """
        if self.is_stuck(now_s):
            return inf
        quiet_s = now_s - self._moved_s if self._begun else 0.0
        speed = self.meter.bytes_per_s()
        expected_s = (chunks + len(self._begun)) * self._chunk_bytes / speed if speed else 0.0
        return max(expected_s, quiet_s) if quiet_s > _QUIET_S else expected_s

    def is_stale(self, now_s: float) -> bool:
        """Whether the speed was not measured for a while, and is not being measured now."""
        is_idle = not self._begun and not self.waiting
        return is_idle and now_s - self._ended_s > _FRESH_S

    def is_stuck(self, now_s: float) -> bool:
        """Whether the tier hangs: its oldest read has been under way for too long."""
        return bool(self._begun) and now_s - next(iter(self._begun.values())) > self._stuck_s

    def check(self) -> None:
        keys = [*self._demand, *self._others, *self._begun]
        assert len(keys) == len({*keys}), "read twice"
        numbers = [number for number, _ in self._demand.values()]
        assert numbers == sorted(numbers)
