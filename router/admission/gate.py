"""Late binding: a request is bound to a replica when one can soon begin with it, not before.

Until then it waits here, where the shortest goes first, and where it is placed
anew with the KV and the queues of that moment.

Synchronous, without clock or I/O: its driver (`router.admission.async_gate` with
asyncio, a model with a plain event loop) calls `Gate.arrive` for each request,
and `Gate.pump` whenever a replica's queue has shortened and by `Gate.next_pump_s`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from router.admission.queue import Entry, WaitingQueue
from router.fleet import Decision, Fleet, Replica, State, Ticket
from router.latency import NO_KV, KvNeed, Promised
from warmroute_common.api_errors import RateLimitedError

Place = Callable[[float, Promised], Decision]
"""Places one request as of a time, behind waiting requests that go first; raises what
`Fleet.place` raises."""

_LOOKS_PER_PUMP: Final = 8
"""Placings of either kind in one pump: nothing else runs meanwhile."""
_ALIKE: Final = 0.1
"""Requests whose predicted work differs by no more than this share may be equal prompts."""
_CLOSE_S: Final = 1e-6
"""A queue that is longer than it may be by less than this is not: sums of times are not exact."""
_RECHECK_S: Final = 0.25
"""At least so often is the queue looked at: KV that has come, or a replica that is up
again, may have changed where a request would go."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A request that waits, and what its last placing said."""

    place: Place
    wanted: Replica
    """The replica that it would have gone to."""
    model: str | None
    """That it asks for."""
    kv: KvNeed
    """KV memory that it will take."""
    may_wait_s: float
    """How long it may wait there when it is sent."""

    @property
    def slot(self) -> int:
        """Of that replica."""
        return self.wanted.slot


Waiting = Entry[Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that goes now and counts as in flight; its ``ticket`` must be finished."""

    decision: Decision
    ticket: Ticket
    waited_s: float


End = Admitted | Exception
"""Of waiting; the exception is for the client."""


class Gate:
    """Says which requests go now and which wait; see the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._config = fleet.config.admission
        self._fleet = fleet
        self._queue: WaitingQueue[Held] = WaitingQueue(
            self._config.max_waiting, self._config.ageing
        )
        self._holds = self._config.enabled and fleet.config.policy == "ttft"
        self._ready_s = inf

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def arrive(
        self,
        place: Place,
        now_s: float,
        *,
        model: str | None = None,
        at_once: bool = False,
        max_wait_s: float = inf,
    ) -> Admitted | Waiting:
        """Let a request go, or wait if its replica is busy and it need not go ``at_once``.

        It waits for ``max_wait_s`` or the configured time, whichever is less.
        Raises `RateLimitedError` when the queue is full, and what ``place`` raises.
        """
        decision = place(now_s, Promised())
        if not at_once and self._holds:
            # Rates differ a little from replica to replica: requests of about the same length
            # count too, or a burst of equal prompts would all wait where it was placed last.
            about_s = decision.picked.cost.busy_s * (1.0 + _ALIKE)
            before = self._queue.ahead_of(about_s, now_s)
            if any(each.item.slot == decision.picked.replica.slot for each in before):
                decision = place(now_s, _promised(before))
        service_s = decision.picked.cost.busy_s
        held = self._held(place, model, decision)
        if at_once or not self._holds or self._may_go(held, service_s, now_s):
            return self._admit(decision, now_s)
        waiting = self._queue.offer(
            held,
            service_s=service_s,
            now_s=now_s,
            deadline_s=now_s + min(max_wait_s, self._config.max_wait_s),
        )
        if waiting is None:
            raise self._full(service_s, now_s)
        wait_s = _believed_wait_s(decision.picked.replica, now_s, held.kv)
        self._ready_s = min(self._ready_s, now_s + max(0.0, wait_s - held.may_wait_s))
        return waiting

    def pump(self, now_s: float) -> Sequence[tuple[Waiting, End]]:
        """Return whose waiting ends: may go now, cannot be placed, or has waited too long.

        A request whose replica is ready is placed anew, in order; while any replica is free,
        so are the first of the others, which may have come to prefer it.
        """
        ended: list[tuple[Waiting, End]] = [
            (each, self._too_late(each, now_s)) for each in self._queue.expired(now_s)
        ]
        promised, passed = Promised(), _Passed()
        looks_if = {True: _LOOKS_PER_PUMP, False: _LOOKS_PER_PUMP}
        free = self._free(now_s)
        for waiting in self._queue.candidates():
            held = waiting.item
            is_ready = passed.lets(held) and (
                held.wanted.is_held_off or self._is_ready(held, now_s)
            )
            end = None
            if looks_if[is_ready] and (is_ready or any(e.serves(held.model) for e in free)):
                looks_if[is_ready] -= 1
                end = self._look(waiting, promised, now_s)
            if end is None:
                promised.add(waiting.item.slot, waiting.service_s)
                passed.note(waiting.item)
            else:
                self._queue.remove(waiting)
                ended.append((waiting, end))
        self._ready_s = self._next_ready_s(now_s)
        return ended

    def next_pump_s(self, now_s: float) -> float:
        """When to `pump` at the latest, as seen at ``now_s``; infinite while none waits."""
        if not len(self):
            return inf
        return min(self._ready_s, self._queue.next_deadline_s, now_s + _RECHECK_S)

    def leave(self, waiting: Waiting) -> None:
        """Forget a request that waits no longer; nothing if its waiting has ended."""
        self._queue.remove(waiting)

    def _look(self, waiting: Waiting, promised: Promised, now_s: float) -> End | None:
        """Place a request anew: let it go, or note what it waits for and return None."""
        try:
            decision = waiting.item.place(now_s, promised)
        except Exception as error:  # noqa: BLE001  (its client gets it; those behind go on)
            return error
        waiting.item = held = self._held(waiting.item.place, waiting.item.model, decision)
        if self._is_ready(held, now_s):
            return self._admit(decision, now_s, waited_s=now_s - waiting.arrived_s)
        self._queue.revalue(waiting, decision.picked.cost.busy_s)
        return None

    def _held(self, place: Place, model: str | None, decision: Decision) -> Held:
        picked = decision.picked
        return Held(
            place=place,
            model=model,
            wanted=picked.replica,
            kv=picked.kv,
            # What it has to fetch overlaps its waiting, if it is sent that early.
            may_wait_s=self._config.dispatch_ahead_s + picked.cost.fetched_s,
        )

    def _is_ready(self, held: Held, now_s: float) -> bool:
        """Whether the replica that a request wants can soon begin with it, or is gone."""
        if held.wanted.state is not State.UP:
            return True  # it is placed anew
        return _believed_wait_s(held.wanted, now_s, held.kv) <= held.may_wait_s + _CLOSE_S

    def _free(self, now_s: float) -> list[Replica]:
        """Return the replicas that can soon begin with some request."""
        longest_s = self._config.dispatch_ahead_s + _CLOSE_S
        up = (each for each in self._fleet.replicas.values() if each.state is State.UP)
        return [each for each in up if _believed_wait_s(each, now_s) <= longest_s]

    def _next_ready_s(self, now_s: float) -> float:
        """When the first request's, or any busy, replica will be ready if all goes as predicted."""
        if not len(self):
            return inf
        first, passed = [], _Passed()
        for each in self._queue.candidates():
            if passed.lets(each.item):
                first.append(each.item)
                passed.note(each.item)
        after_s = [
            _believed_wait_s(each.wanted, now_s, each.kv) - each.may_wait_s for each in first
        ]
        free_after_s = (
            _believed_wait_s(each, now_s) - self._config.dispatch_ahead_s
            for each in self._fleet.replicas.values()
        )
        after_s += [each for each in free_after_s if each > _CLOSE_S]
        return now_s + max(0.0, min(after_s))

    def _may_go(self, held: Held, service_s: float, now_s: float) -> bool:
        """Whether its replica can take a newcomer, and no request before it waits for that."""
        if not self._is_ready(held, now_s):
            return False
        before = self._queue.ahead_of(service_s, now_s)
        return all(each.item.wanted is not held.wanted for each in before)

    def _admit(self, decision: Decision, now_s: float, waited_s: float = 0.0) -> Admitted:
        # Started here and not by the handler that is woken for it: the next placing must see it.
        ticket = self._fleet.start(decision, now_s)
        return Admitted(decision=decision, ticket=ticket, waited_s=waited_s)

    def _full(self, service_s: float, now_s: float) -> RateLimitedError:
        return RateLimitedError(
            f"{len(self)} requests wait for a replica and no more may "
            "(admission.max_waiting in the router's configuration); send it again later",
            cause="full",
            retry_after_s=self._retry_after_s(service_s, now_s),
        )

    def _too_late(self, waiting: Waiting, now_s: float) -> RateLimitedError:
        waited_s = waiting.deadline_s - waiting.arrived_s
        return RateLimitedError(
            f"no replica could take the request within {waited_s:g} s, as long as it may wait "
            "(admission.max_wait_s in the router's configuration, or the client's own limit); "
            "send it again later",
            cause="deadline",
            retry_after_s=self._retry_after_s(waiting.service_s, now_s),
        )

    def _retry_after_s(self, service_s: float, now_s: float) -> int:
        """Return the predicted seconds until a newcomer of this service would have its turn."""
        before = self._queue.ahead_of(service_s, now_s)
        up = [each for each in self._fleet.replicas.values() if each.state is State.UP]
        work_s = sum(each.service_s for each in before)
        work_s += sum(each.queue.wait_s(now_s) for each in up)
        return max(1, ceil(work_s / max(1, len(up))))


class _Passed:
    """Replicas that requests wait for, which were passed by: others go after them.

    But a request whose KV takes longer to be fetched may be sent before: it has to wait longer
    there in any case, and takes nothing of the replica until then.
    """

    def __init__(self) -> None:
        self._may_wait_s: dict[int, float] = {}

    def lets(self, held: Held) -> bool:
        """Whether a request may go before the requests that were passed by."""
        return held.may_wait_s > self._may_wait_s.get(held.slot, -inf)

    def note(self, held: Held) -> None:
        """Note a request that goes on waiting."""
        longest_s = self._may_wait_s.get(held.slot, -inf)
        self._may_wait_s[held.slot] = max(longest_s, held.may_wait_s)


def _promised(waiting: Sequence[Waiting]) -> Promised:
    promised = Promised()
    for each in waiting:
        promised.add(each.item.slot, each.service_s)
    return promised


def _believed_wait_s(replica: Replica, now_s: float, kv: KvNeed = NO_KV) -> float:
    """Return a newcomer's wait; none where it is but a guess, so as to hold nothing up."""
    return replica.queue.wait_s(now_s, kv) if replica.rates.observations else 0.0
