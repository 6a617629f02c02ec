"""The waiting queue: requests in the order in which they go, and the work before each place.

`WaitingQueue` keeps the order, `WorkAhead` is what a placing reserves for those before it.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Final

from router.fleet.replica import Replica
from router.fleet.replica_queue import NO_KV, KvNeed
from router.priority import Priority
from router.scheduling.request_scheduler import PlacementRequest
from router.scheduling.scorer import ReservedWork

_LONGEST_SHARES: Final = (0.2, 0.5, 0.25)
"""By class (`Priority`), for how much waiting the longest service counts: a share of the time that
requests may wait. The sum is below 1, so the worst place in the queue is made up for in that
time."""
_MOST_IN_PART: Final = 64
"""Requests of which the work is summed one by one: the square root of a long queue."""


@dataclass(eq=False, slots=True, kw_only=True)
class WaitingRequest:
    """A request that waits, and the result of its last placing."""

    request: PlacementRequest
    arrived_s: float
    deadline_s: float
    service_s: float
    """Predicted time that it will take of the replica."""
    replica: Replica
    """The replica that it would go to; changed by `WaitingQueue.revalue`."""
    prompt: int | None = None
    """Key of its prompt's last whole block; None if it has none."""
    kv: KvNeed = NO_KV
    """KV memory that it will take."""
    may_wait_s: float = 0.0
    """How long it may wait at the replica: a fetch overlaps that, if it is sent this early."""
    number: int = 0
    """Order of arrival; set by `WaitingQueue`."""


class WorkInOrder:
    """The service times of waiting requests in their order, with the sum of those before a place.

    The order is cut into parts of at most `_MOST_IN_PART`, and each part's sum is kept. So a change
    or a sum costs about the same in a queue of thousands as in a short one.
    """

    def __init__(self) -> None:
        # The parts are in order, and none is empty. A part's sum is computed again when the part
        # changes: adding and subtracting for hours would make it wrong.
        self._parts: list[list[tuple[float, int, float]]] = []
        self._firsts: list[tuple[float, int]] = []
        self._sums: list[float] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, key: float, number: int, service_s: float) -> None:
        """Add a request; its ``number`` separates it from others with this key."""
        at = max(0, bisect_right(self._firsts, (key, number)) - 1)
        if not self._parts:
            self._insert_part(0, [])
        insort(self._parts[at], (key, number, service_s))
        if len(self._parts[at]) > _MOST_IN_PART:
            half = len(self._parts[at]) // 2
            self._insert_part(at + 1, self._parts[at][half:])
            del self._parts[at][half:]
        self._changed(at)

    def remove(self, key: float, number: int) -> None:
        """Remove a request that was added with this key and number."""
        at = bisect_right(self._firsts, (key, number)) - 1
        part = self._parts[at]
        del part[bisect_left(part, (key, number))]
        self._changed(at)

    def before(self, place: tuple[float, int]) -> tuple[int, float]:
        """Return how many requests have a lower key and number, and their service times' sum."""
        whole = max(0, bisect_left(self._firsts, place) - 1)
        count, total_s = sum(map(len, self._parts[:whole])), sum(self._sums[:whole])
        if whole < len(self._parts):
            part = self._parts[whole]
            at = bisect_left(part, place)
            count, total_s = count + at, total_s + _service_s(part[:at])
        return count, total_s

    def check(self) -> None:
        """Raise AssertionError if the parts are not in order, or a kept value is wrong."""
        entries = list(chain.from_iterable(self._parts))
        assert entries == sorted(entries)
        assert self._firsts == [each[0][:2] for each in self._parts]
        assert self._sums == [_service_s(each) for each in self._parts]
        assert all(len(each) <= _MOST_IN_PART for each in self._parts)

    def _insert_part(self, at: int, part: list[tuple[float, int, float]]) -> None:
        self._parts.insert(at, part)
        self._firsts.insert(at, (part[0][:2] if part else (-inf, 0)))
        self._sums.insert(at, _service_s(part))

    def _changed(self, at: int) -> None:
        part = self._parts[at]
        if part:
            self._firsts[at], self._sums[at] = part[0][:2], _service_s(part)
        else:
            del self._parts[at], self._firsts[at], self._sums[at]


def _service_s(part: Sequence[tuple[float, int, float]]) -> float:
    return sum(service_s for _, _, service_s in part)


class WaitingQueue:
    """At most ``max_waiting`` requests by class, shortest first; waiting makes up for both.

    The order is that of ``class + service_s - ageing * waited_s``. All age alike, so two requests
    never change places by waiting: the order is kept, not computed.

    A class begins where the longest service of the better one ends: of requests that arrive
    together, all of the better class go first. No request starves, because services are capped. A
    ``normal`` one is overtaken only by ``normal`` ones that arrive in the first half of the time
    that it may wait, and by ``high`` ones in the first 70% of it; a ``batch`` one by others in the
    first 95% of it.

    If the queue is full, a request of a worse class makes room for a better one: the last one of
    the worst class. Within a class, a client's key may hold all places until another key wants one:
    then the last request of the key that holds most makes room.
    """

    # Two sorted lists. Up to 1,000 requests they are 1.4 to 2.6 times faster than sortedcontainers'
    # SortedList for a change and 1.3 to 3.6 times faster for a full read
    # (docs/decisions/waiting-queue-sorted-lists.md).

    def __init__(self, max_waiting: int, ageing: float, max_wait_s: float) -> None:
        """``ageing``: seconds of service that a second of waiting makes up for; above 0."""
        self._max_waiting = max_waiting
        self._ageing = ageing
        self._longest_s = [ageing * max_wait_s * share for share in _LONGEST_SHARES]
        high_s, normal_s, _ = self._longest_s
        self._begins_s = (-high_s, 0.0, normal_s)
        """By class, what counts in addition to a request's service."""
        self._by_client: list[Counter[str | None]] = [Counter() for _ in Priority]
        """By class, how many requests each client has here."""
        self._by_slot: dict[int, WorkInOrder] = {}
        """By the slot of a replica, the requests that would go there."""
        self._first: dict[int, int] = {}
        """By prompt, the number of the request whose work counts for all that have this prompt: it
        is computed once or a few times, however many wait for it."""
        self._added = 0
        # The numbers are unique: requests themselves are never compared.
        self._order: list[tuple[float, int, WaitingRequest]] = []
        self._deadlines: list[tuple[float, int, WaitingRequest]] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline; infinite if nobody waits."""
        return self._deadlines[0][0] if self._deadlines else inf

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""
        return len(self) >= self._max_waiting

    def has_place(self, client: str | None, priority: Priority) -> bool:
        """Whether a request of a client would find a place, if need be that of another one."""
        return not self.is_full or self._yielding(client, priority) is not None

    def make_room(self, client: str | None, priority: Priority) -> WaitingRequest | None:
        """Remove and return the request that makes room in a full queue, if one has to."""
        if not self.is_full or (yielding := self._yielding(client, priority)) is None:
            return None
        last = next(
            each
            for *_, each in reversed(self._order)
            if (each.request.priority, each.request.client) == yielding
        )
        self.remove(last)
        return last

    def _yielding(
        self, client: str | None, priority: Priority
    ) -> tuple[Priority, str | None] | None:
        """Return the class and the client of which a request would make room for a new one.

        In the worst class that waits, it is the client that holds most places. In the class of the
        new request itself, only if that is more than the new one's client would hold.
        """
        worst = max(each for each in Priority if self._by_client[each] or each is priority)
        if not (places := self._by_client[worst]):
            return None
        ((greedy, most),) = places.most_common(1)
        return (worst, greedy) if worst > priority or most > places[client] + 1 else None

    def add(self, waiting: WaitingRequest) -> bool:
        """Add a request; return False, and change nothing, if the queue is full."""
        if self.is_full:
            return False
        self._added += 1
        waiting.number = self._added
        self._insert(waiting)
        return True

    def in_order(self, limit: int | None = None) -> Sequence[WaitingRequest]:
        """Return the first ``limit`` requests, or all; a copy."""
        return [waiting for _, _, waiting in self._order[:limit]]

    def counts(self, waiting: WaitingRequest) -> bool:
        """Whether a request's work counts: the first of those with its prompt."""
        return waiting.prompt is None or self._first.get(waiting.prompt) == waiting.number

    def ahead_of(
        self, priority: Priority, service_s: float, arrived_s: float, number: int = 0
    ) -> "WorkAhead":
        """Return the work that goes before a request of this class, service, arrival and number.

        It is read from the queue when it is asked for: use it before the queue changes.
        """
        return WorkAhead(self._by_slot, (self._key(priority, service_s, arrived_s), number))

    def revalue(self, waiting: WaitingRequest, service_s: float, replica: Replica) -> None:
        """Move a request to another service time and replica; nothing if it does not wait."""
        if self.remove(waiting):
            waiting.service_s, waiting.replica = service_s, replica
            self._insert(waiting)

    def remove(self, waiting: WaitingRequest) -> bool:
        """Remove a request; return whether it still waited."""
        key = self._key_of(waiting)
        if not _take(self._order, key, waiting):
            return False
        places, client = self._by_client[waiting.request.priority], waiting.request.client
        places[client] -= 1
        if not places[client]:
            del places[client]
        if waiting.prompt is not None and self._first.get(waiting.prompt) == waiting.number:
            del self._first[waiting.prompt]
        slot = waiting.replica.slot
        self._by_slot[slot].remove(key, waiting.number)
        if not self._by_slot[slot]:
            del self._by_slot[slot]
        return _take(self._deadlines, waiting.deadline_s, waiting)

    def expired(self, now_s: float) -> Sequence[WaitingRequest]:
        """Remove and return the requests whose deadline has passed, the earliest first."""
        late = []
        while self.next_deadline_s <= now_s:
            late.append(self._deadlines[0][2])
            self.remove(late[-1])
        return late

    def check(self) -> None:
        """Raise AssertionError if the orders do not hold the same requests, in order."""
        assert self._order == sorted(self._order)
        assert self._deadlines == sorted(self._deadlines)
        assert {each for *_, each in self._order} == {each for *_, each in self._deadlines}
        assert len(self) == len(self._deadlines) <= self._max_waiting
        for priority, places in zip(Priority, self._by_client, strict=True):
            of_class = [each for *_, each in self._order if each.request.priority is priority]
            assert places == Counter(each.request.client for each in of_class)
        by_slot = Counter(each.replica.slot for *_, each in self._order)
        assert {slot: len(work) for slot, work in self._by_slot.items()} == by_slot
        numbers = {each.number for *_, each in self._order}
        assert {*self._first.values()} <= numbers, "a prompt of a request that left"
        for work in self._by_slot.values():
            work.check()

    def _key(self, priority: Priority, service_s: float, arrived_s: float) -> float:
        counted_s = self._begins_s[priority] + min(service_s, self._longest_s[priority])
        return counted_s + self._ageing * arrived_s

    def _key_of(self, waiting: WaitingRequest) -> float:
        return self._key(waiting.request.priority, waiting.service_s, waiting.arrived_s)

    def _insert(self, waiting: WaitingRequest) -> None:
        key = self._key_of(waiting)
        self._by_client[waiting.request.priority][waiting.request.client] += 1
        work = self._by_slot.setdefault(waiting.replica.slot, WorkInOrder())
        is_first = waiting.prompt is None or waiting.number == self._first.setdefault(
            waiting.prompt, waiting.number
        )
        work.add(key, waiting.number, waiting.service_s if is_first else 0.0)
        insort(self._order, (key, waiting.number, waiting))
        insort(self._deadlines, (waiting.deadline_s, waiting.number, waiting))


class WorkAhead(ReservedWork):
    """The work of waiting requests before a place in the queue, by the slots of their replicas."""

    def __init__(self, by_slot: Mapping[int, WorkInOrder], place: tuple[float, int]) -> None:
        self._by_slot = by_slot
        self._place = place
        self._known: dict[int, tuple[int, float]] = {}

    def work_s(self, slot: int) -> float:
        """Return the seconds of a replica's time that are reserved."""
        return self._before(slot)[1]

    def requests(self, slot: int) -> int:
        """Return how many requests will come to a replica."""
        return self._before(slot)[0]

    def _before(self, slot: int) -> tuple[int, float]:
        if (known := self._known.get(slot)) is None:
            work = self._by_slot.get(slot)
            known = self._known[slot] = (0, 0.0) if work is None else work.before(self._place)
        return known


def _take(
    order: list[tuple[float, int, WaitingRequest]], key: float, waiting: WaitingRequest
) -> bool:
    """Remove a request from a sorted list; return whether it was there."""
    at = bisect_left(order, (key, waiting.number))
    if at == len(order) or order[at][2] is not waiting:
        return False
    del order[at]
    return True
