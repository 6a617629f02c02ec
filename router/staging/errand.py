"""What prefetches and copies have in common: an agent is asked, and waited for a little."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from router.config import PrefetchConfig
from router.fleet import Fleet
from router.staging.agent_client import Agents
from router.staging.backoff import Backoff
from warmroute_common.tasks import end_all


class Timing(StrEnum):
    """What a request had of the KV that was asked for ahead of it."""

    IN_TIME = "in-time"
    """All of it was there when the request was forwarded."""
    LATE = "late"
    """The request was forwarded before."""
    FAILED = "failed"
    """Some of it will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the chunks asked for by the time that the request was forwarded."""

    asked: int
    error: str | None = None
    """Why nothing is known of them, or not all came; or None."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    replica_id: str
    first_key: bytes
    until_s: float
    """When the request that asked for it goes on without it."""


_Outcome = TypeVar("_Outcome", bound=Outcome)


class Errands(Generic[_Outcome]):
    """Errands of agents for requests. One that fails or is late is an outcome, never an error."""

    name: ClassVar[str]
    most: ClassVar[int]
    """So many are followed at once; one more is not begun."""

    def __init__(
        self,
        config: PrefetchConfig,
        fleet: Fleet,
        agents: Agents,
        backoff: Backoff,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._agents = agents
        self._backoff = backoff
        self._clock = clock
        self._under_way: dict[asyncio.Task[_Outcome], _UnderWay] = {}

    async def stop(self) -> None:
        """Follow nothing any more; what is under way goes on at the replicas."""
        await end_all(list(self._under_way))

    async def _run(
        self,
        replica_id: str,
        first_key: bytes,
        gain_s: float,
        not_yet: _Outcome,
        errand: Callable[[float], Coroutine[Any, Any, _Outcome]],
    ) -> _Outcome:
        """Return how an errand ended, or ``not_yet`` after its gain or the cap.

        ``errand`` gets the seconds that it is waited for. It goes on after that, and is followed.
        """
        if len(self._under_way) >= self.most:
            return replace(not_yet, error=f"{self.most} {self.name} are under way already")
        if not self._backoff.may_ask(replica_id):
            return replace(not_yet, error="not tried for a while, since it fails there")
        wait_s = min(gain_s, self._config.wait_cap_s)
        until_s = self._clock() + wait_s
        task = asyncio.create_task(errand(wait_s))
        self._under_way[task] = _UnderWay(replica_id, first_key, until_s)
        task.add_done_callback(self._under_way.pop)
        # Not wait_for: it would cancel the task, which has yet to see whether the agent
        # answers at all, and how fast it was.
        await asyncio.wait({task}, timeout=wait_s)
        return task.result() if task.done() else not_yet
