"""Requests held back, shortest first; waiting makes up for length.

The order is that of ``service_s - ageing * waited_s``. All age alike, so two
entries never change places by waiting: the order is kept, not computed. And
no entry starves: it is only passed by entries that came within ``service_s /
ageing`` seconds after it.

Pure: no clock, no I/O.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(Generic[T]):
    """A waiting request; made by `WaitingQueue.offer`."""

    item: T
    number: int
    arrived_s: float
    deadline_s: float
    service_s: float
    """Of a replica's time that it will take, as far as is known now."""


class WaitingQueue(Generic[T]):
    """Entries in order of service, at most ``max_waiting`` of them."""

    def __init__(self, max_waiting: int, ageing: float) -> None:
        """``ageing``: seconds of service that a second of waiting makes up for; above 0."""
        self._max_waiting = max_waiting
        self._ageing = ageing
        self._offered = 0
        # The numbers are unique: entries themselves are never compared.
        self._order: list[tuple[float, int, Entry[T]]] = []
        self._deadlines: list[tuple[float, int, Entry[T]]] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def next_deadline_s(self) -> float:
        """When the first entry will have waited too long; infinite where none waits."""
        return self._deadlines[0][0] if self._deadlines else inf

    def offer(
        self, item: T, *, service_s: float, now_s: float, deadline_s: float
    ) -> Entry[T] | None:
        """Let a request wait; return None, and change nothing, where the queue is full."""
        if len(self) >= self._max_waiting:
            return None
        self._offered += 1
        entry = Entry(
            item=item,
            number=self._offered,
            arrived_s=now_s,
            deadline_s=deadline_s,
            service_s=service_s,
        )
        self._insert(entry)
        return entry

    def candidates(self, limit: int | None = None) -> Sequence[Entry[T]]:
        """Return the first few in order, or all; later changes of the queue do not show in it."""
        return [entry for _, _, entry in self._order[:limit]]

    def ahead_of(self, service_s: float, arrived_s: float) -> Sequence[Entry[T]]:
        """Return the entries that would be before one of this service and arrival."""
        return self.candidates(bisect_left(self._order, (self._key(service_s, arrived_s),)))

    def revalue(self, entry: Entry[T], service_s: float) -> None:
        """Move an entry to where another service time belongs; nothing if it waits no more."""
        if self.remove(entry):
            entry.service_s = service_s
            self._insert(entry)

    def remove(self, entry: Entry[T]) -> bool:
        """Take an entry out; return whether it still waited."""
        key = self._key(entry.service_s, entry.arrived_s)
        return _take(self._order, key, entry) and _take(self._deadlines, entry.deadline_s, entry)

    def expired(self, now_s: float) -> Sequence[Entry[T]]:
        """Take out and return the entries whose deadline has come, the earliest first."""
        late = []
        while self.next_deadline_s <= now_s:
            late.append(self._deadlines[0][2])
            self.remove(late[-1])
        return late

    def check(self) -> None:
        """Raise AssertionError if the two orders do not hold the same entries, in order."""
        assert self._order == sorted(self._order)
        assert self._deadlines == sorted(self._deadlines)
        assert {entry for *_, entry in self._order} == {entry for *_, entry in self._deadlines}
        assert len(self) == len(self._deadlines) <= self._max_waiting

    def _key(self, service_s: float, arrived_s: float) -> float:
        return service_s + self._ageing * arrived_s

    def _insert(self, entry: Entry[T]) -> None:
        key = self._key(entry.service_s, entry.arrived_s)
        insort(self._order, (key, entry.number, entry))
        insort(self._deadlines, (entry.deadline_s, entry.number, entry))


def _take(order: list[tuple[float, int, Entry[T]]], key: float, entry: Entry[T]) -> bool:
    """Remove an entry from a sorted list; return whether it was there."""
    at = bisect_left(order, (key, entry.number))
    if at == len(order) or order[at][2] is not entry:
        return False
    del order[at]
    return True
