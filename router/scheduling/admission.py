"""Admission: a request is bound to a replica when one can soon begin with it, not before.

Until then it waits in the router, by its priority class and the shortest first, and is placed again
with the KV and the queues of that moment. `AdmissionQueue` decides who goes and who waits, without
a clock or I/O. `AdmissionController` drives it with an event loop: one future per waiting request,
one timer.

A request enters and leaves in one of these ways:

1. Its replica can soon begin with it, and nobody before it waits for that replica: it is admitted
   on arrival, and counts as in flight from then on.
2. The queue is full: 429 on arrival, or when it makes room for another client's request or one
   of a better class.
3. No replica is predicted to begin with it within the time that it may wait: 429 on arrival.
4. It waits, until a dispatch finds its replica ready: it is placed again and admitted.
5. It waits, until its deadline passes: 429.
6. It waits, until no replica can take it, or placing it fails: that error.
7. Its client leaves, or the router stops: it is removed.

With ``admission.no_replica_wait_s``, a request for which no replica is up waits in the
`NoReplicaQueue` before it arrives here, and again if all replicas go down in case 6.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

from router.fleet.decision import Candidate, Decision
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica, ReplicaState
from router.fleet.scaling import HeldWork
from router.priority import Priority
from router.scheduling.no_replica_queue import NoReplicaQueue
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.scheduling.waiting_queue import WaitingQueue, WaitingRequest
from warmroute_common.api_errors import NoReplicaError, OverloadedError, RateLimitedError
from warmroute_common.command_line import counted

_TAKING: Final = frozenset({ReplicaState.UP, ReplicaState.UNKNOWN})
"""States of replicas that may get a request: those not probed yet, while none is up."""
_PLACINGS_PER_DISPATCH: Final = 8
"""Placings in one dispatch, of ready and of other requests each: nothing else runs meanwhile."""
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

    @property
    def fleet(self) -> Fleet:
        """The fleet whose requests these are."""
        return self._fleet

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
            self.refuse_if_full(request.client, request.priority, now_s)
        may_wait = self._holds and not at_once
        permitted_s = min(max_wait_s, self._config.max_wait_s)
        if may_wait:
            request = replace(request, begin_by_s=now_s + permitted_s)
        decision = self._scheduler.place(request, now_s)
        if may_wait:
            # Rates differ slightly between replicas: requests of about the same length count too.
            # Otherwise a burst of equal prompts would all wait for the replica of the last one.
            about_s = decision.picked.busy_s * (1.0 + self._fleet.weights.alike_share)
            ahead = self._queue.ahead_of(request.priority, about_s, now_s)
            if ahead.requests(decision.picked.computes_at.slot):
                decision = self._scheduler.place(request, now_s, ahead)
        picked = decision.picked
        waiting = WaitingRequest(
            request=request,
            arrived_s=now_s,
            deadline_s=now_s + permitted_s,
            service_s=picked.busy_s,
            replica=picked.computes_at,
            prompt=picked.keys.keys[-1] if picked.keys.keys else None,
            kv=picked.kv,
            may_wait_s=self._may_wait_s(picked),
        )
        if may_wait and (wait_s := _least_wait_s(decision)) > permitted_s:  # case 3
            raise _never_in_time(wait_s, permitted_s)
        if not may_wait or self._may_go(waiting, now_s):  # case 1
            return self._admit(decision, now_s)
        if (displaced := self._queue.make_room(request.client, request.priority)) is not None:
            self._displaced.append(displaced)
            self._ready_s = now_s
        if not self._queue.add(waiting):  # case 2
            raise self._full(now_s)
        wait_s = waiting.replica.queue.wait_s(now_s, waiting.kv)
        self._ready_s = min(self._ready_s, now_s + max(0.0, wait_s - waiting.may_wait_s))
        return waiting

    def refuse_if_full(self, client: str | None, priority: Priority, now_s: float) -> None:
        """Raise `RateLimitedError` if a newcomer would find no place in the queue and have to wait.

        Much cheaper than a placing, and possible before a prompt is read: the more requests are
        refused, the less each may cost.
        """
        if self._holds and not self._queue.has_place(client, priority) and not self._free(now_s):
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

    def held(self) -> Iterator[HeldWork]:
        """Yield the work of the waiting requests; a prompt that several have counts once."""
        for each in self._queue.in_order():
            work_s = each.service_s if self._queue.counts(each) else 0.0
            yield HeldWork(each.replica, work_s, each.kv.tokens)

    def leave(self, waiting: WaitingRequest) -> None:
        """Remove a request (case 7); nothing if its waiting has ended."""
        self._queue.remove(waiting)

    def _place_again(self, waiting: WaitingRequest, now_s: float) -> End | None:
        """Place a request again: admit it, or note what it waits for and return None."""
        ahead = self._queue.ahead_of(
            *(waiting.request.priority, waiting.service_s, waiting.arrived_s, waiting.number)
        )
        try:
            decision = self._scheduler.place(waiting.request, now_s, ahead)
        except Exception as error:  # noqa: BLE001  (its client gets it; those behind continue)
            return error  # case 6
        picked = decision.picked
        self._queue.revalue(waiting, picked.busy_s, picked.computes_at)
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
        ahead = self._queue.ahead_of(waiting.request.priority, waiting.service_s, now_s)
        return not ahead.requests(waiting.replica.slot)

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
    return min(each.begins_in_s for each in decision.candidates)


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
        self._no_replica = NoReplicaQueue(queue.fleet, clock)
        self._clock = clock
        self._released: dict[WaitingRequest, asyncio.Future[Admitted]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._next_dispatch_s = -inf
        self._closed = False

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._queue) + len(self._no_replica)

    def held(self) -> Iterator[HeldWork]:
        """Yield the work of the requests that wait for a busy replica."""
        return self._queue.held()

    def without_replica(self) -> Mapping[str | None, int]:
        """Return by model how many requests wait because no replica is up."""
        return self._no_replica.by_model()

    async def replica_up(
        self,
        model: str | None,
        *,
        among: Collection[str] | None = None,
        max_wait_s: float = inf,
    ) -> float:
        """Wait while no replica of a model is up; return the seconds, 0 without a wait.

        Raises what `NoReplicaQueue.wait` raises.
        """
        if self._closed or not self._no_replica.must_wait(model, among):
            return 0.0
        return await self._no_replica.wait(model, among=among, max_wait_s=max_wait_s)

    def refuse_if_full(self, client: str | None, priority: Priority) -> None:
        """Raise `RateLimitedError` if a newcomer would be refused, before its prompt is read."""
        if not self._closed:
            self._queue.refuse_if_full(client, priority, self._clock())

    async def admit(
        self, request: PlacementRequest, *, at_once: bool = False, max_wait_s: float = inf
    ) -> Admitted:
        """Wait until a request may go; the caller must finish the ticket.

        Raises what `AdmissionQueue.arrive` and `replica_up` raise, the error of a later placing,
        and `OverloadedError` if the router stops meanwhile.
        """
        began_s, again_s = self._clock(), 0.0
        while True:
            try:
                admitted = await self._admit(request, at_once=at_once, max_wait_s=max_wait_s)
            except NoReplicaError:
                left_s = max_wait_s - (self._clock() - began_s)
                if at_once or not await self.replica_up(
                    request.model, among=request.among, max_wait_s=left_s
                ):
                    raise
                again_s = self._clock() - began_s
                continue
            return replace(admitted, waited_s=again_s + admitted.waited_s)

    async def _admit(
        self, request: PlacementRequest, *, at_once: bool, max_wait_s: float
    ) -> Admitted:
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
        """Dispatch soon; to be called when a replica's queue has shortened, or one is up."""
        if len(self._no_replica):
            self._no_replica.look()
        self._dispatch_by(-inf)

    def close(self) -> None:
        """Refuse the waiting requests with 503; later ones do not wait."""
        self._closed = True
        self._no_replica.close()
        for released in self._released.values():
            if not released.done():
                released.set_exception(OverloadedError("the router stops; send the request again"))

    def _dispatch_by(self, at_s: float) -> None:
        at_s = max(at_s, self._next_dispatch_s)
        if not len(self._queue) or at_s >= self._timer_s:
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
