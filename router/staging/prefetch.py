"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

from cacheengine.wire import PrefetchReply
from router.config import PrefetchConfig
from router.fleet import Decision, Replica
from router.staging.agent_client import AgentError, Agents
from router.staging.backoff import Backoff

MAX_UNDER_WAY: Final = 1024
"""Prefetches that are followed at once; one more is not begun."""
_ANSWER_SHARE: Final = 0.95
"""Of a request's wait: until then an agent is to answer, so that what it tells comes in time."""


PrefetchCall = Callable[[], Awaitable[PrefetchReply]]
"""Has one decision's chunks promoted; raises `AgentError`."""
PrefetchCalls = Callable[[Decision], PrefetchCall | None]
"""How chunks are promoted at a replica without an agent of ours; None where they cannot be."""


def no_call(decision: Decision) -> None:
    """Return how chunks are promoted where there is nothing but agents."""


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
        others: PrefetchCalls = no_call,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._agents = agents
        self._others = others
        self._backoff = backoff
        self._clock = clock
        self._under_way: set[asyncio.Task[PrefetchOutcome]] = set()

    async def run(self, decision: Decision) -> PrefetchOutcome:
        """Promote what the decision asks for; return after its gain or the cap at the latest.

        The promotion goes on at the replica after that.
        """
        replica, keys = self._replicas[decision.replica_id], decision.prefetch_keys
        if not self._config.enabled or not keys:
            return PrefetchOutcome(asked=0)
        wait_s = min(decision.expected_gain_s, self._config.wait_cap_s)
        call = self._call(replica, decision, wait_s)
        if call is None:
            return PrefetchOutcome(asked=0)
        not_yet = PrefetchOutcome(asked=len(keys), pending=len(keys))
        if len(self._under_way) >= MAX_UNDER_WAY:
            return replace(not_yet, error=f"{MAX_UNDER_WAY} prefetches are under way already")
        if not self._backoff.may_ask(replica.id):
            return replace(not_yet, error="its agent is left alone, since it fails")
        began_s = self._clock()
        task = asyncio.create_task(self._promote(replica.id, call, len(keys), began_s))
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

    def _call(self, replica: Replica, decision: Decision, wait_s: float) -> PrefetchCall | None:
        """Return how a replica is told to promote chunks; None where it cannot be."""
        if replica.config.agent_url is None:
            return self._others(decision)
        agent = self._agents(replica.config.agent_url)
        return partial(
            agent.prefetch,
            decision.prefetch_keys,
            wait_s=_ANSWER_SHARE * wait_s,
            pin_s=self._config.pin_s,
        )

    async def _promote(
        self, replica_id: str, call: PrefetchCall, asked: int, began_s: float
    ) -> PrefetchOutcome:
        """Return what becomes of so many chunks; raises nothing."""
        try:
            reply = await call()
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
