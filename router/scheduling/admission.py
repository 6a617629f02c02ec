"""Admission: a request is bound to a replica when one can soon begin with it, not before.

Until then it waits in the router, the shortest first, and is placed again with the KV and the
queues of that moment. `AdmissionQueue` decides who goes and who waits, without a clock or I/O.
`AdmissionController` drives it with an event loop: one future per waiting request, one timer.

A request enters and leaves in one of these ways:

1. Its replica can soon begin with it, and nobody before it waits for that replica: it is admitted
   on arrival, and counts as in flight from then on.
2. The queue is full: 429 on arrival, or when it makes room for another client's request.
3. No replica is predicted to begin with it within the time that it may wait: 429 on arrival.
4. It waits, until a dispatch finds its replica ready: it is placed again and admitted.
5. It waits, until its deadline passes: 429.
6. It waits, until no replica can take it, or placing it fails: that error.
7. Its client leaves, or the router stops: it is removed.
"""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf
from typing import Final

from router.fleet.decision import Candidate, Decision
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, ReplicaState
from router.fleet.replica_queue import NO_KV, KvNeed
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.scorer import ReservedWork
from warmroute_common.api_errors import OverloadedError, RateLimitedError
from warmroute_common.command_line import counted

_TAKING: Final = frozenset({ReplicaState.UP, ReplicaState.UNKNOWN})
"""States of replicas that may get a request: those not probed yet, while none is up."""
_PLACINGS_PER_DISPATCH: Final = 8
"""Placings in one dispatch, of ready and of other requests each: nothing else runs meanwhile."""
_MOST_IN_PART: Final = 64
"""Requests of which the work is summed one by one: the square root of a long queue."""
_TOLERANCE_S: Final = 1e-6
"""A queue is too long only by more than this: sums of times are not exact."""
_RECHECK_S: Final = 0.25
"""Longest time between dispatches: KV that has arrived, or a replica that is up again, may change
where a request would go."""
_DISPATCH_GAP_S: Final = 0.005
"""Shortest time between dispatches: queues shorten in bursts, and replicas have work until then."""
_RETRY_AFTER_KEPT_S: Final = 1.0
"""How long a computed ``Retry-After`` is given to all that are refused."""
_IDLE_GAP: Final = 10.0
"""Shortest time after a dispatch that admitted nobody, in multiples of its duration: scanning a
long queue takes at most a tenth of the time."""


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
    """Waiting requests, shortest first; waiting makes up for length. At most ``max_waiting``.

    The order is that of ``service_s - ageing * waited_s``. All age alike, so two requests never
    change places by waiting: the order is kept, not computed. No request starves: a service counts
    as ``ageing * max_wait_s / 2`` at most. So only requests that arrive in the first half of the
    time that it may wait can overtake it.

    A client's key may hold the whole queue, until another key wants a place: then the last request
    of the key that holds most makes room.
    """

    # Two sorted lists. Up to 1,000 requests they are 1.4 to 2.6 times faster than sortedcontainers'
    # SortedList for a change and 1.3 to 3.6 times faster for a full read
    # (docs/decisions/waiting-queue-sorted-lists.md).

    def __init__(self, max_waiting: int, ageing: float, max_wait_s: float = inf) -> None:
        """``ageing``: seconds of service that a second of waiting makes up for; above 0."""
        self._max_waiting = max_waiting
        self._ageing = ageing
        self._longest_s = ageing * max_wait_s / 2
        self._by_client: Counter[str | None] = Counter()
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

    def has_place(self, client: str | None) -> bool:
        """Whether a request of a client would find a place, if need be that of another client."""
        return not self.is_full or self._greediest(client) is not None

    def make_room(self, client: str | None) -> WaitingRequest | None:
        """Remove and return the request that makes room in a full queue, if one has to."""
        if not self.is_full or (greedy := self._greediest(client)) is None:
            return None
        last = next(each for *_, each in reversed(self._order) if each.request.client == greedy[0])
        self.remove(last)
        return last

    def _greediest(self, client: str | None) -> tuple[str | None] | None:
        """Return the client that holds most places, if that is more than this one would hold."""
        ((greedy, places),) = self._by_client.most_common(1) or [(None, 0)]
        return (greedy,) if places > self._by_client[client] + 1 else None

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

    def ahead_of(self, service_s: float, arrived_s: float, number: int = 0) -> "WorkAhead":
        """Return the work that goes before a request of this service, arrival and number.

        It is read from the queue when it is asked for: use it before the queue changes.
        """
        return WorkAhead(self._by_slot, (self._key(service_s, arrived_s), number))

    def revalue(self, waiting: WaitingRequest, service_s: float, replica: Replica) -> None:
        """Move a request to another service time and replica; nothing if it does not wait."""
        if self.remove(waiting):
            waiting.service_s, waiting.replica = service_s, replica
            self._insert(waiting)

    def remove(self, waiting: WaitingRequest) -> bool:
        """Remove a request; return whether it still waited."""
        key = self._key(waiting.service_s, waiting.arrived_s)
        if not _take(self._order, key, waiting):
            return False
        client = waiting.request.client
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]
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
        assert self._by_client == Counter(each.request.client for *_, each in self._order)
        by_slot = Counter(each.replica.slot for *_, each in self._order)
        assert {slot: len(work) for slot, work in self._by_slot.items()} == by_slot
        numbers = {each.number for *_, each in self._order}
        assert {*self._first.values()} <= numbers, "a prompt of a request that left"
        for work in self._by_slot.values():
            work.check()

    def _key(self, service_s: float, arrived_s: float) -> float:
        return min(service_s, self._longest_s) + self._ageing * arrived_s

    def _insert(self, waiting: WaitingRequest) -> None:
        key = self._key(waiting.service_s, waiting.arrived_s)
        self._by_client[waiting.request.client] += 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that goes now and counts as in flight; its ``ticket`` must be finished."""

    decision: Decision
    ticket: Ticket
    waited_s: float


End = Admitted | Exception
"""How waiting ends; the exception is for the client."""


class AdmissionQueue:
    """Decides which requests go now and which wait.

    Its driver calls `arrive` for each request, and `dispatch` whenever a replica's queue has
    shortened, and by `next_dispatch_s` at the latest.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._fleet = fleet = scheduler.fleet
        self._config = fleet.config.admission
        config = self._config
        self._queue = WaitingQueue(config.max_waiting, config.ageing, config.max_wait_s)
        self._displaced: list[WaitingRequest] = []
        self._retry_after: tuple[float, int] = (-inf, 1)
        """Until when it counts, and its seconds."""
        self._holds = self._config.enabled and fleet.config.policy == "ttft"
        self._ready_s = inf

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def arrive(
        self,
        request: PlacementRequest,
        now_s: float,
        *,
        at_once: bool = False,
        max_wait_s: float = inf,
    ) -> Admitted | WaitingRequest:
        """Admit a request, or let it wait if its replica is busy and it need not go ``at_once``.

        It waits here for ``max_wait_s`` or the configured time, whichever is less. Raises
        `RateLimitedError` if the queue is full, or if no replica is predicted to begin with it
        within that time, and what `RequestScheduler.place` raises.
        """
        if not at_once:
            self.refuse_if_full(request.client, now_s)
        decision = self._scheduler.place(request, now_s)
        may_wait = self._holds and not at_once
        if may_wait:
            # Rates differ slightly between replicas: requests of about the same length count too.
            # Otherwise a burst of equal prompts would all wait for the replica of the last one.
            about_s = decision.picked.cost.busy_s * (1.0 + self._fleet.weights.alike_share)
            ahead = self._queue.ahead_of(about_s, now_s)
            if ahead.requests(decision.picked.replica.slot):
                decision = self._scheduler.place(request, now_s, ahead)
        picked = decision.picked
        permitted_s = min(max_wait_s, self._config.max_wait_s)
        waiting = WaitingRequest(
            request=request,
            arrived_s=now_s,
            deadline_s=now_s + permitted_s,
            service_s=picked.cost.busy_s,
            replica=picked.replica,
            prompt=picked.keys.keys[-1] if picked.keys.keys else None,
            kv=picked.kv,
            may_wait_s=self._may_wait_s(picked),
        )
        if may_wait and (wait_s := _least_wait_s(decision)) > permitted_s:  # case 3
            raise _never_in_time(wait_s, permitted_s)
        if not may_wait or self._may_go(waiting, now_s):  # case 1
            return self._admit(decision, now_s)
        if (displaced := self._queue.make_room(request.client)) is not None:
            self._displaced.append(displaced)
            self._ready_s = now_s
        if not self._queue.add(waiting):  # case 2
            raise self._full(now_s)
        wait_s = waiting.replica.queue.wait_s(now_s, waiting.kv)
        self._ready_s = min(self._ready_s, now_s + max(0.0, wait_s - waiting.may_wait_s))
        return waiting

    def refuse_if_full(self, client: str | None, now_s: float) -> None:
        """Raise `RateLimitedError` if a newcomer would find no place in the queue and have to wait.

        Much cheaper than a placing, and possible before a prompt is read: the more requests are
        refused, the less each may cost.
        """
        if self._holds and not self._queue.has_place(client) and not self._free(now_s):
            raise self._full(now_s)

    def dispatch(self, now_s: float) -> Sequence[tuple[WaitingRequest, End]]:
        """Return the requests whose waiting ends, in order, each with how it ends.

        Requests whose replica is ready are placed again. While any replica is free, the first of
        the others are too: they may prefer it by now.
        """
        ended: list[tuple[WaitingRequest, End]] = [
            (each, self._too_late(each, now_s))
            for each in self._queue.expired(now_s)  # case 5
        ]
        ended += [(each, self._full(now_s)) for each in self._displaced]
        self._displaced.clear()
        passed, first = _Passed(), []
        placings_left = {True: _PLACINGS_PER_DISPATCH, False: _PLACINGS_PER_DISPATCH}
        free = self._free(now_s)
        for waiting in self._queue.in_order():
            lets = passed.lets(waiting)
            is_ready = lets and (waiting.replica.is_held_off or self._is_ready(waiting, now_s))
            model = waiting.request.model
            may_go = is_ready or (free and any(each.serves(model) for each in free))
            if may_go and placings_left[is_ready]:
                placings_left[is_ready] -= 1
                end = self._place_again(waiting, now_s)
                if end is not None:
                    self._queue.remove(waiting)
                    ended.append((waiting, end))
                    continue
                lets = passed.lets(waiting)  # it may wait for another replica now
            if lets:
                first.append(waiting)
                passed.note(waiting)
        self._ready_s = self._next_ready_s(first, now_s)
        return ended

    def next_dispatch_s(self, now_s: float) -> float:
        """Return when to `dispatch` at the latest, as seen now; infinite if nobody waits."""
        if not len(self):
            return inf
        return min(self._ready_s, self._queue.next_deadline_s, now_s + _RECHECK_S)

    def leave(self, waiting: WaitingRequest) -> None:
        """Remove a request (case 7); nothing if its waiting has ended."""
        self._queue.remove(waiting)

    def _place_again(self, waiting: WaitingRequest, now_s: float) -> End | None:
        """Place a request again: admit it, or note what it waits for and return None."""
        ahead = self._queue.ahead_of(waiting.service_s, waiting.arrived_s, waiting.number)
        try:
            decision = self._scheduler.place(waiting.request, now_s, ahead)
        except Exception as error:  # noqa: BLE001  (its client gets it; those behind continue)
            return error  # case 6
        picked = decision.picked
        self._queue.revalue(waiting, picked.cost.busy_s, picked.replica)
        waiting.kv, waiting.may_wait_s = picked.kv, self._may_wait_s(picked)
        if self._is_ready(waiting, now_s):  # case 4
            return self._admit(decision, now_s, waited_s=now_s - waiting.arrived_s)
        return None

    def _admit(self, decision: Decision, now_s: float, waited_s: float = 0.0) -> Admitted:
        # Started here, not by the handler that wakes later: the next placing must see it.
        ticket = self._fleet.start(decision, now_s)
        return Admitted(decision=decision, ticket=ticket, waited_s=waited_s)

    # --- whether replicas can soon begin

    def _may_wait_s(self, candidate: Candidate) -> float:
        return self._config.dispatch_ahead_s + candidate.cost.fetched_s

    def _may_go(self, waiting: WaitingRequest, now_s: float) -> bool:
        """Whether its replica can take a newcomer, and nobody before it waits for that replica."""
        if not self._is_ready(waiting, now_s):
            return False
        return not self._queue.ahead_of(waiting.service_s, now_s).requests(waiting.replica.slot)

    def _is_ready(self, waiting: WaitingRequest, now_s: float) -> bool:
        """Whether the request's replica can soon begin with it, or takes no requests."""
        if waiting.replica.state not in _TAKING:
            return True  # it is placed again
        wait_s = waiting.replica.queue.wait_s(now_s, waiting.kv)
        return wait_s <= waiting.may_wait_s + _TOLERANCE_S

    def _free(self, now_s: float) -> list[Replica]:
        """Return the replicas that can soon begin with some request."""
        longest_s = self._config.dispatch_ahead_s + _TOLERANCE_S
        taking = (each for each in self._fleet.replicas.values() if each.state in _TAKING)
        return [each for each in taking if each.queue.wait_s(now_s) <= longest_s]

    def _next_ready_s(self, first: Sequence[WaitingRequest], now_s: float) -> float:
        """Return when the replica of one of the first, or any busy replica, should be ready."""
        if not first:
            return inf
        after_s = [each.replica.queue.wait_s(now_s, each.kv) - each.may_wait_s for each in first]
        free_after_s = (
            each.queue.wait_s(now_s) - self._config.dispatch_ahead_s
            for each in self._fleet.replicas.values()
        )
        after_s += [each for each in free_after_s if each > _TOLERANCE_S]
        return now_s + max(0.0, min(after_s))

    # --- refusals

    def _full(self, now_s: float) -> RateLimitedError:
        return RateLimitedError(
            f"the router's queue is full ({counted(len(self), 'request')}, admission.max_waiting "
            "in its configuration); send the request again later",
            cause="full",
            retry_after_s=self._retry_after_s(now_s),
        )

    def _too_late(self, waiting: WaitingRequest, now_s: float) -> RateLimitedError:
        waited_s = waiting.deadline_s - waiting.arrived_s
        return RateLimitedError(
            f"no replica could take the request within {waited_s:g} s, the longest wait "
            "(admission.max_wait_s in the router's configuration, or the client's own limit); "
            "send it again later",
            cause="deadline",
            retry_after_s=self._retry_after_s(now_s),
        )

    def _retry_after_s(self, now_s: float) -> int:
        """Return the predicted seconds until the whole queue is dispatched; computed rarely."""
        until_s, seconds = self._retry_after
        if now_s >= until_s:
            taking = [each for each in self._fleet.replicas.values() if each.state in _TAKING]
            work_s = sum(each.service_s for each in self._queue.in_order())
            work_s += sum(each.queue.wait_s(now_s) for each in taking)
            seconds = max(1, ceil(work_s / max(1, len(taking))))
            self._retry_after = (now_s + _RETRY_AFTER_KEPT_S, seconds)
        return seconds


def _least_wait_s(decision: Decision) -> float:
    """Return how long a newcomer waits, here and at its replica, until one begins with it."""
    return min(each.cost.queue_s for each in decision.candidates)


def _never_in_time(wait_s: float, permitted_s: float) -> RateLimitedError:
    return RateLimitedError(
        f"no replica is predicted to begin with the request within {permitted_s:g} s, the longest "
        "wait (admission.max_wait_s in the router's configuration, or the client's own limit), but "
        f"in {wait_s:.1f} s; send it again later",
        cause="deadline",
        retry_after_s=max(1, ceil(wait_s - permitted_s)),
    )


class _Passed:
    """Replicas that requests earlier in the queue wait for: later requests do not overtake them.

    A request whose KV takes longer to fetch may be sent before them: it has to wait longer there in
    any case, and takes none of the replica's time until then.
    """

    def __init__(self) -> None:
        self._may_wait_s: dict[int, float] = {}

    def lets(self, waiting: WaitingRequest) -> bool:
        """Whether a request may go before the noted ones."""
        return waiting.may_wait_s > self._may_wait_s.get(waiting.replica.slot, -inf)

    def note(self, waiting: WaitingRequest) -> None:
        """Note a request that continues to wait."""
        slot = waiting.replica.slot
        self._may_wait_s[slot] = max(self._may_wait_s.get(slot, -inf), waiting.may_wait_s)


class AdmissionController:
    """Holds requests until the `AdmissionQueue` admits them.

    Interface for the request's lifecycle: `admit` waits and returns an `Admitted`, whose ticket the
    caller must finish on every way out. After each `Ticket.finish` and each first token it must
    call `wake`, since the replica's queue has shortened.
    """

    def __init__(self, queue: AdmissionQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._released: dict[WaitingRequest, asyncio.Future[Admitted]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._next_dispatch_s = -inf
        self._closed = False

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def refuse_if_full(self, client: str | None) -> None:
        """Raise `RateLimitedError` if a newcomer would be refused, before its prompt is read."""
        if not self._closed:
            self._queue.refuse_if_full(client, self._clock())

    async def admit(
        self, request: PlacementRequest, *, at_once: bool = False, max_wait_s: float = inf
    ) -> Admitted:
        """Wait until a request may go; the caller must finish the ticket.

        Raises what `AdmissionQueue.arrive` raises, the error of a later placing, and
        `OverloadedError` if the router stops meanwhile.
        """
        arrived = self._queue.arrive(
            request, self._clock(), at_once=at_once or self._closed, max_wait_s=max_wait_s
        )
        if isinstance(arrived, Admitted):
            return arrived
        released: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        self._released[arrived] = released
        self._dispatch_by(self._queue.next_dispatch_s(self._clock()))
        try:
            return await released
        except asyncio.CancelledError:
            # A dispatch may have admitted the request in this same turn of the loop: then its
            # ticket has no other owner.
            if released.done() and not released.cancelled() and released.exception() is None:
                self._give_back(released.result())
            raise
        finally:
            del self._released[arrived]
            self._queue.leave(arrived)

    def wake(self) -> None:
        """Dispatch soon; to be called when a replica's queue has shortened."""
        self._dispatch_by(-inf)

    def close(self) -> None:
        """Refuse the waiting requests with 503; later ones do not wait."""
        self._closed = True
        for released in self._released.values():
            if not released.done():
                released.set_exception(OverloadedError("the router stops; send the request again"))

    def _dispatch_by(self, at_s: float) -> None:
        at_s = max(at_s, self._next_dispatch_s)
        if not len(self) or at_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        delay_s = max(0.0, at_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._dispatch)

    def _dispatch(self) -> None:
        self._timer, self._timer_s = None, inf
        began_s = self._clock()
        ended_any = False
        try:
            for waiting, end in self._queue.dispatch(began_s):
                ended_any = True
                self._deliver(self._released[waiting], end)
        finally:
            now_s = self._clock()
            gap_s = 0.0 if ended_any else _IDLE_GAP * (now_s - began_s)
            self._next_dispatch_s = now_s + max(_DISPATCH_GAP_S, gap_s)
            self._dispatch_by(self._queue.next_dispatch_s(began_s))

    def _deliver(self, released: asyncio.Future[Admitted], end: End) -> None:
        if released.done():
            # Its client has left, or the router stops, and its handler has not run since: the
            # request was still in the queue.
            if isinstance(end, Admitted):
                self._give_back(end)
        elif isinstance(end, Admitted):
            released.set_result(end)
        else:
            released.set_exception(end)

    def _give_back(self, admitted: Admitted) -> None:
        admitted.ticket.finish(self._clock(), ok=False)
        self.wake()
