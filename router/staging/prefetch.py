"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from router.config import PrefetchConfig
from router.fleet import Decision, Replica
from router.staging.agent_client import AgentError, Agents, StagingAgent
from router.staging.backoff import Backoff

MAX_UNDER_WAY: Final = 1024
"""Prefetches that are followed at once; one more is not begun."""
_ANSWER_SHARE: Final = 0.95
"""Of a request's wait: until then an agent is to answer, so that what it tells comes in time."""


class Timing(StrEnum):
    """What a request had of the KV that was asked for ahead of it."""

    IN_TIME = "in-time"
    """All of it was there when the request was forwarded."""
    LATE = "late"
    """The request was forwarded before."""
    FAILED = "failed"
    """Some of it will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOutcome:
    """What became of the chunks asked for; the counts add up to ``asked``."""

    asked: int
    promoted: int = 0
    """In the CPU tier now, including the ones that were there before."""
    pending: int = 0
    missing: int = 0
    promoted_bytes: int = 0
    waited_s: float = 0.0
    error: str | None = None
    """Why nothing is known of the chunks (they count as pending), or None."""

    @property
    def timing(self) -> Timing:
        """Whether it was done when the request was forwarded."""
        if self.error is not None or self.missing:
            return Timing.FAILED
        return Timing.LATE if self.pending else Timing.IN_TIME

    def __str__(self) -> str:
        return (
            f"asked={self.asked};promoted={self.promoted};"
            f"pending={self.pending};missing={self.missing}"
        )


class Prefetcher:
    """Has replicas promote chunks. A failed or late prefetch is an outcome, never an error."""

    def __init__(
        self,
        config: PrefetchConfig,
        replicas: Mapping[str, Replica],
        agents: Agents,
        backoff: Backoff,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._agents = agents
        self._backoff = backoff
        self._clock = clock
        self._under_way: set[asyncio.Task[PrefetchOutcome]] = set()

    async def run(self, decision: Decision) -> PrefetchOutcome:
        """Promote what the decision asks for; return after its gain or the cap at the latest.

        The promotion goes on at the replica after that.
        """
        replica, keys = self._replicas[decision.replica_id], decision.prefetch_keys
        if not self._config.enabled or not keys or replica.config.agent_url is None:
            return PrefetchOutcome(asked=0)
        not_yet = PrefetchOutcome(asked=len(keys), pending=len(keys))
        if len(self._under_way) >= MAX_UNDER_WAY:
            return replace(not_yet, error=f"{MAX_UNDER_WAY} prefetches are under way already")
        if not self._backoff.may_ask(replica.id):
            return replace(not_yet, error="its agent is left alone, since it fails")
        began_s = self._clock()
        wait_s = min(decision.expected_gain_s, self._config.wait_cap_s)
        agent = self._agents(replica.config.agent_url)
        task = asyncio.create_task(self._promote(replica.id, agent, keys, wait_s, began_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        # Not wait_for: the task has yet to see whether the agent answers at all.
        await asyncio.wait({task}, timeout=wait_s)
        outcome = task.result() if task.done() else not_yet
        return replace(outcome, waited_s=self._clock() - began_s)

    async def stop(self) -> None:
        """Follow no prefetch any more; the promotions go on at the replicas."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _promote(
        self,
        replica_id: str,
        agent: StagingAgent,
        keys: Sequence[bytes],
        wait_s: float,
        began_s: float,
    ) -> PrefetchOutcome:
        """Return what an agent says of these chunks; raises nothing."""
        asked = len(keys)
        try:
            reply = await agent.prefetch(
                keys, wait_s=_ANSWER_SHARE * wait_s, pin_s=self._config.pin_s
            )
        except AgentError as error:
            self._backoff.failed(replica_id, began_s, error)
            return PrefetchOutcome(asked=asked, pending=asked, error=str(error))
        self._backoff.answered(replica_id)
        return PrefetchOutcome(
            asked=asked,
            promoted=reply.resident + reply.promoted,
            pending=reply.pending,
            missing=reply.missing,
            promoted_bytes=reply.promoted_bytes,
        )
