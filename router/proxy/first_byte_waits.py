"""Waits for first bytes that will not come, given up so that another replica is asked.

A long prompt may take minutes, so by default no fixed time limits the wait for the first byte. A
replica that does not answer health checks either, that sleeps or computes nothing, or whose LMCache
server has ended, will not answer: `FirstByteWaits` ends such a wait. One that answers its health
checks with 503 may still finish its requests.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState, Stall
from router.proxy.upstream import AttemptFailedError, Wait
from router.record.records import Cause


@dataclass(eq=False, kw_only=True)
class _Movable:
    """The wait of a request, which may go to another replica instead if it ``may_move``."""

    wait: Wait
    replica: Replica
    model: str | None
    tried: Collection[str] = field(repr=False)
    may_move: bool


_STALLED: Final = MappingProxyType(
    {
        Stall.SILENT: Cause.SILENT,
        Stall.ASLEEP: Cause.HUNG,
        Stall.STUCK: Cause.TIMEOUT,
    }
)


class HangSource(Protocol):
    """Knows which replicas wait for an LMCache server that has ended."""

    def hung(self, replica_id: str) -> "asyncio.Future[None] | None":
        """Return a future that is done when the replica hangs; None if it uses no such server."""


class FirstByteWaits:
    """The requests that wait for their first byte."""

    def __init__(self, fleet: Fleet, hangs: HangSource | None = None) -> None:
        self._fleet = fleet
        self._hangs = hangs
        self._waits: set[_Movable] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def at(
        self, replica: Replica, *, model: str | None, tried: Collection[str], may_move: bool
    ) -> Iterator[Wait]:
        """Make a wait that is given up when the replica will not answer and another is up.

        ``tried`` are the ids of replicas that failed to answer. A request that may not move waits
        on, unless the replica is stuck: then nothing else would end the wait.
        """
        wait = Wait()
        waiting = _Movable(wait=wait, replica=replica, model=model, tried=tried, may_move=may_move)
        hung = self._hangs.hung(replica.id) if self._hangs is not None and may_move else None

        def note_hung(_: object) -> None:
            wait.give_up(
                AttemptFailedError(Cause.HUNG, "the LMCache server that it waits for has ended")
            )

        self._waits.add(waiting)
        if hung is not None:
            hung.add_done_callback(note_hung)
        try:
            # The replica may have gone down while its KV was staged.
            self._look_at(waiting)
            yield wait
        finally:
            wait.end()
            self._waits.discard(waiting)
            if hung is not None:
                hung.remove_done_callback(note_hung)

    def look(self) -> None:
        """Give up useless waits. Call it when a replica was found up, down or stalled."""
        for each in self._waits:
            self._look_at(each)

    def _look_at(self, waiting: _Movable) -> None:
        replica = waiting.replica
        if replica.stall is None:
            return
        if replica.stall is Stall.STUCK or (waiting.may_move and self._has_another(waiting)):
            cause = _STALLED[replica.stall]
            waiting.wait.give_up(AttemptFailedError(cause, replica.why_down))

    def _has_another(self, waiting: _Movable) -> bool:
        return any(
            each.state is ReplicaState.UP
            and each is not waiting.replica
            and each.id not in waiting.tried
            and each.serves(waiting.model)
            for each in self._fleet.replicas.values()
        )
