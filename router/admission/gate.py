"""Late binding: a request is bound to a replica when one can soon begin with it, not before.

Until then it waits here, where the shortest goes first, and where it is placed
anew with the KV and the queues of that moment.

Synchronous, without clock or I/O: whoever drives it (`router.admission.async_gate` with
asyncio, a model with a plain event loop) calls `Gate.arrive` for each request,
and `Gate.pump` whenever a replica's line has shortened and by `Gate.next_pump_s`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import ceil, inf
from typing import Final

from router.admission.queue import Entry, WaitingLine
from router.config import RateLimited
from router.fleet import Decision, Fleet, Replica, State, Ticket
from router.latency import Cost, Promised

Place = Callable[[float, Promised], Decision]
"""Places one request as of a time, behind those who wait and go first; raises what `Fleet.place`
raises."""

_LOOKS_PER_PUMP: Final = 8
"""Placings of either kind in one pump: nothing else runs meanwhile."""
_CLOSE_S: Final = 1e-6
"""A queue that is longer than it may be by less than this is not: sums of times are not exact."""
_RECHECK_S: Final = 0.25
"""At least so often is the line looked at: KV that has come, or a replica that is up
again, may have changed where a request would go."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A request that waits, and what its last placing said."""

    place: Place
    wanted: str
    """Id of the replica that it would have gone to."""
    slot: int
    """Of that replica."""
    may_queue_s: float
    """With how much work before it there it would have gone."""
    worth_s: float
    """How long waiting for it is better than any other replica, be that idle."""
    roster: int
    """`Fleet.roster_version` then: who has come since was not weighed."""


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
    """Says who goes now and who waits; see the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._config = fleet.config.admission
        self._fleet = fleet
        self._line: WaitingLine[Held] = WaitingLine(self._config.max_waiting, self._config.ageing)
        self._holds = self._config.enabled and fleet.config.policy == "ttft"
        self._ready_s = inf

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def arrive(
        self, place: Place, now_s: float, *, at_once: bool = False, max_wait_s: float = inf
    ) -> Admitted | Waiting:
        """Let a request go, or wait if its replica is busy and it need not go ``at_once``.

        It waits for ``max_wait_s`` or the configured time, whichever is less.
        Raises `RateLimited` when the line is full, and what ``place`` raises.
        """
        decision = place(now_s, Promised())
        cost = self._cost(decision)
        if not at_once and self._holds:
            before = self._line.ahead_of(self._about_s(cost.busy_s), now_s)
            if any(each.item.slot == decision.picked.replica.slot for each in before):
                decision = place(now_s, _promised(before))
                cost = self._cost(decision)
        held = self._held(place, decision, cost)
        if at_once or not self._holds or self._may_go(held, cost.busy_s, now_s):
            return self._admit(decision, now_s)
        waiting = self._line.offer(
            held,
            service_s=cost.busy_s,
            now_s=now_s,
            deadline_s=now_s + min(max_wait_s, self._config.max_wait_s),
        )
        if waiting is None:
            raise self._full(cost.busy_s, now_s)
        busy_s = self._queue_s(held.wanted, now_s) - held.may_queue_s
        self._ready_s = min(self._ready_s, now_s + max(0.0, busy_s))
        return waiting

    def pump(self, now_s: float) -> Sequence[tuple[Waiting, End]]:
        """Return whose waiting ends: may go now, cannot be placed, or has waited too long."""
        ended: list[tuple[Waiting, End]] = [
            (each, self._too_late(each, now_s)) for each in self._line.expired(now_s)
        ]
        scan = _Scan(self._fleet, self._config.dispatch_ahead_s, now_s)
        for waiting in self._line.candidates():
            if not scan.is_ready(waiting.item) or not self._try(waiting, scan, ended):
                scan.pass_by(waiting)
        scan.looks = 0
        for waiting in scan.hopeful():
            scan.promised.remove(waiting.item.slot, waiting.service_s)
            if not self._try(waiting, scan, ended):
                scan.promised.add(waiting.item.slot, waiting.service_s)
        self._ready_s = scan.next_ready_s(self._line.candidates())
        return ended

    def next_pump_s(self, now_s: float) -> float:
        """When to `pump` at the latest, as seen at ``now_s``; infinite while nobody waits."""
        if not len(self):
            return inf
        return min(self._ready_s, self._line.next_deadline_s, now_s + _RECHECK_S)

    def leave(self, waiting: Waiting) -> None:
        """Forget a request that waits no longer; nothing if its waiting has ended."""
        self._line.remove(waiting)

    def _try(self, waiting: Waiting, scan: "_Scan", ended: list[tuple[Waiting, End]]) -> bool:
        """Look at one who waits; return whether the waiting has ended."""
        if scan.looks == _LOOKS_PER_PUMP:
            return False
        scan.looks += 1
        if (end := self._look(waiting, scan)) is None:
            return False
        self._line.remove(waiting)
        ended.append((waiting, end))
        return True

    def _look(self, waiting: Waiting, scan: "_Scan") -> End | None:
        """Place a request anew: let it go, or note what it waits for and return None."""
        try:
            decision = waiting.item.place(scan.now_s, scan.promised)
        except Exception as error:  # noqa: BLE001  (its client gets it; those behind go on)
            return error
        cost = self._cost(decision)
        waiting.item = held = self._held(waiting.item.place, decision, cost)
        if scan.is_ready(held):
            admitted = self._admit(decision, scan.now_s, waited_s=scan.now_s - waiting.arrived_s)
            scan.note_start(held)
            return admitted
        self._line.revalue(waiting, cost.busy_s)
        return None

    def _about_s(self, service_s: float) -> float:
        """Return the most that a service may be elsewhere, or seem to be, and be this one's equal.

        Rates differ a little from replica to replica: a request that is placed by what waits
        before it at one must see that at the others, too, or a burst of equal prompts ends
        where it was looked at last.
        """
        judgment = self._fleet.judgment
        return service_s * judgment.alike + judgment.alike_s

    def _cost(self, decision: Decision) -> Cost:
        return decision.picked.cost

    def _held(self, place: Place, decision: Decision, cost: Cost) -> Held:
        # What it has to fetch overlaps the work before it, if it is sent that early.
        may_queue_s = self._config.dispatch_ahead_s + cost.fetched_s
        idle_s = {each.replica_id: each.cost.alone_s for each in decision.candidates}
        own_s = idle_s.pop(decision.replica_id)
        return Held(
            place=place,
            wanted=decision.replica_id,
            slot=decision.picked.replica.slot,
            may_queue_s=may_queue_s,
            worth_s=min(idle_s.values(), default=inf) - own_s,
            roster=self._fleet.roster_version,
        )

    def _may_go(self, held: Held, service_s: float, now_s: float) -> bool:
        """Whether its replica can take a newcomer, and nobody waits for it who is before that."""
        if not _fits(self._queue_s(held.wanted, now_s), held.may_queue_s):
            return False
        before = self._line.ahead_of(service_s, now_s)
        return all(each.item.wanted != held.wanted for each in before)

    def _admit(self, decision: Decision, now_s: float, waited_s: float = 0.0) -> Admitted:
        # Started here and not by whoever is woken for it: the next placing must see it.
        ticket = self._fleet.start(decision, now_s)
        return Admitted(decision=decision, ticket=ticket, waited_s=waited_s)

    def _queue_s(self, replica_id: str, now_s: float) -> float:
        return _believed_queue_s(self._fleet.replicas[replica_id], now_s)

    def _full(self, service_s: float, now_s: float) -> RateLimited:
        return RateLimited(
            f"{len(self)} requests wait for a replica and no more may "
            "(admission.max_waiting in the router's configuration); send it again later",
            cause="full",
            retry_after_s=self._retry_after_s(service_s, now_s),
        )

    def _too_late(self, waiting: Waiting, now_s: float) -> RateLimited:
        waited_s = waiting.deadline_s - waiting.arrived_s
        return RateLimited(
            f"no replica could take the request within {waited_s:g} s, as long as it may wait "
            "(admission.max_wait_s in the router's configuration, or the client's own limit); "
            "send it again later",
            cause="deadline",
            retry_after_s=self._retry_after_s(waiting.service_s, now_s),
        )

    def _retry_after_s(self, service_s: float, now_s: float) -> int:
        """Return the predicted seconds until a newcomer of this service would have its turn."""
        before = self._line.ahead_of(service_s, now_s)
        up = [each for each in self._fleet.replicas.values() if each.state is State.UP]
        work_s = sum(each.service_s for each in before)
        work_s += sum(each.line.queue_s(now_s) for each in up)
        return max(1, ceil(work_s / max(1, len(up))))


class _Scan:
    """One pump's view of the replicas' queues: whom it is worth placing anew.

    Those who may go by their last placing, and, while any replica is free, the
    first of those who may have come to prefer it.
    """

    def __init__(self, fleet: Fleet, ahead_s: float, now_s: float) -> None:
        self.now_s = now_s
        self._fleet = fleet
        self._ahead_s = ahead_s
        self._queues_s = {
            each.id: _believed_queue_s(each, now_s)
            for each in fleet.replicas.values()
            if each.state is State.UP
        }
        self._free = sum(_fits(queue_s, ahead_s) for queue_s in self._queues_s.values())
        self.looks = 0
        self.promised = Promised()
        """To those who were passed by, where each still waits."""
        self._hopes: list[tuple[float, int, Waiting]] = []

    def is_ready(self, held: Held) -> bool:
        """Whether a request may go to the replica it wants (yes also if that is not up)."""
        return _fits(self._queues_s.get(held.wanted, 0.0), held.may_queue_s)

    def pass_by(self, waiting: Waiting) -> None:
        """Count one who goes on waiting as work before those behind."""
        held = waiting.item
        gain_s = self._before_s(held) - held.worth_s
        if held.roster != self._fleet.roster_version:
            gain_s = inf
        if self._free and gain_s >= 0:
            self._hopes.append((-gain_s, len(self._hopes), waiting))
        self.promised.add(held.slot, waiting.service_s)

    def hopeful(self) -> Sequence[Waiting]:
        """Return those who would gain most if a free replica were now the better one."""
        if not self._free:
            return ()
        return [waiting for *_, waiting in nsmallest(_LOOKS_PER_PUMP, self._hopes)]

    def _before_s(self, held: Held) -> float:
        """Return the work that would be before a request where it waits."""
        return self._queues_s.get(held.wanted, 0.0) + self.promised.work_s(held.slot)

    def note_start(self, held: Held) -> None:
        """Note that a replica was given a request."""
        if (before_s := self._queues_s.get(held.wanted)) is None:
            return  # not up: its queue is nobody's reason to wait
        after_s = _believed_queue_s(self._fleet.replicas[held.wanted], self.now_s)
        self._queues_s[held.wanted] = after_s
        if _fits(before_s, self._ahead_s) and not _fits(after_s, self._ahead_s):
            self._free -= 1

    def next_ready_s(self, waiting: Sequence[Waiting]) -> float:
        """When the next of these, or any busy replica, will be ready if all goes as predicted."""
        queues_s = self._queues_s
        held = [each.item for each in waiting]
        after_s = [queues_s.get(each.wanted, 0.0) - each.may_queue_s for each in held]
        if after_s:
            busy_s = (queue_s - self._ahead_s for queue_s in queues_s.values())
            after_s += [each for each in busy_s if each > _CLOSE_S]
        return self.now_s + max(0.0, min(after_s, default=inf))


def _promised(waiting: Sequence[Waiting]) -> Promised:
    promised = Promised()
    for each in waiting:
        promised.add(each.item.slot, each.service_s)
    return promised


def _fits(queue_s: float, limit_s: float) -> bool:
    return queue_s <= limit_s + _CLOSE_S


def _believed_queue_s(replica: Replica, now_s: float) -> float:
    """Return the work before a newcomer; none where it is but a guess, so as to hold nobody up."""
    return replica.line.queue_s(now_s) if replica.rates.observations else 0.0
