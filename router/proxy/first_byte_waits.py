"""Giving up the wait for an answer's first byte, where it is known to be in vain.

A long prompt may rightly take minutes, so by default nothing bounds that wait. But a replica that
answers no health checks either, or whose LMCache server has ended, will not answer. One that does
answer them, be it with 503, may well end what it has.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.fleet import Fleet, Replica, ReplicaState
from router.proxy.upstream import AttemptFailedError, Wait
from router.record import Cause


@dataclass(eq=False, kw_only=True)
class _Movable:
    """A wait of a request that another replica may get instead."""

    wait: Wait
    replica: Replica
    model: str | None
    tried: Collection[str] = field(repr=False)


class FirstByteWaits:
    """The requests that wait for their first byte, and could be sent elsewhere."""

    def __init__(
        self, fleet: Fleet, hung: Callable[[str], asyncio.Future[None] | None] = lambda _: None
    ) -> None:
        """``hung`` returns what is done when a replica (its id) hangs with its LMCache server."""
        self._fleet = fleet
        self._hung = hung
        self._waits: set[_Movable] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def at(self, replica: Replica, *, model: str | None, tried: Collection[str]) -> Iterator[Wait]:
        """Make a wait at a replica that is given up when that is in vain and another is up.

        ``tried`` are the ids of replicas that have failed to answer.
        """
        wait = Wait()
        waiting = _Movable(wait=wait, replica=replica, model=model, tried=tried)
        hung = self._hung(replica.id)

        def note_hung(_: object) -> None:
            wait.give_up(
                AttemptFailedError(Cause.HUNG, "the LMCache server that it waits for has ended")
            )

        self._waits.add(waiting)
        if hung is not None:
            hung.add_done_callback(note_hung)
        try:
            # It may have been called down while its KV was staged.
            self._look_at(waiting)
            yield wait
        finally:
            wait.end()
            self._waits.discard(waiting)
            if hung is not None:
                hung.remove_done_callback(note_hung)

    def look(self) -> None:
        """Give up what is in vain; to be called when a replica was found up, down or silent."""
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
