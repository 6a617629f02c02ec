"""Ending the wait for a first byte early, when the replica will not answer.

A long prompt may take minutes, so by default nothing limits that wait. But a replica that does not
answer health checks either, or whose LMCache server has ended, will not answer. A replica
that answers its health checks with 503 may still finish its requests.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from router.proxy.upstream import AttemptFailedError, Wait
from router.record.records import Cause


@dataclass(eq=False, kw_only=True)
class _Movable:
    """The wait of a request that may go to another replica instead."""

    wait: Wait
    replica: Replica
    model: str | None
    tried: Collection[str] = field(repr=False)


class HangSource(Protocol):
    """Knows which replicas wait for an LMCache server that has ended."""

    def hung(self, replica_id: str) -> "asyncio.Future[None] | None":
        """Return a future that is done when the replica hangs; None if it uses no such server."""


class FirstByteWaits:
    """The requests that wait for their first byte and could be sent elsewhere."""

    def __init__(self, fleet: Fleet, hangs: HangSource | None = None) -> None:
        self._fleet = fleet
        self._hangs = hangs
        self._waits: set[_Movable] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def at(self, replica: Replica, *, model: str | None, tried: Collection[str]) -> Iterator[Wait]:
        """Make a wait that is given up when the replica will not answer and another is up.

        ``tried`` are the ids of replicas that failed to answer.
        """
        wait = Wait()
        waiting = _Movable(wait=wait, replica=replica, model=model, tried=tried)
        hung = None if self._hangs is None else self._hangs.hung(replica.id)

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
        """Give up useless waits. Call it when a replica was found up, down or silent."""
        for each in self._waits:
            self._look_at(each)

    def _look_at(self, waiting: _Movable) -> None:
        replica = waiting.replica
        if replica.is_silent and self._has_another(waiting):
            waiting.wait.give_up(AttemptFailedError(Cause.SILENT, replica.why_down))

    def _has_another(self, waiting: _Movable) -> bool:
        return any(
            each.state is ReplicaState.UP
            and each is not waiting.replica
            and each.id not in waiting.tried
            and each.serves(waiting.model)
            for each in self._fleet.replicas.values()
        )
