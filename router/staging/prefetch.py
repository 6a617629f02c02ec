"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.config import PrefetchConfig
from router.fleet import Decision, Replica
from router.staging.agent_client import AgentError, Agents


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
    """In the CPU tier now, those that were there before included."""
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
    """Has replicas promote chunks. A failed prefetch is an outcome, never an error."""

    def __init__(
        self,
        config: PrefetchConfig,
        replicas: Mapping[str, Replica],
        agents: Agents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._agents = agents
        self._clock = clock

    async def run(self, decision: Decision) -> PrefetchOutcome:
        """Promote what the decision asks for; return after its gain or the cap at the latest.

        The promotion goes on at the replica after that.
        """
        if not self._config.enabled:
            return PrefetchOutcome(asked=0)
        wait_s = min(decision.expected_gain_s, self._config.wait_cap_s)
        return await self.promote(
            decision.replica_id, decision.prefetch_keys, wait_s=wait_s, pin_s=self._config.pin_s
        )

    async def promote(
        self, replica_id: str, keys: Sequence[bytes], *, wait_s: float, pin_s: float
    ) -> PrefetchOutcome:
        """Promote these chunks of a replica, given whole and in prefix order."""
        asked = len(keys)
        agent_url = self._replicas[replica_id].config.agent_url
        if not asked or agent_url is None:
            return PrefetchOutcome(asked=0)
        began_s = self._clock()
        try:
            reply = await self._agents(agent_url).prefetch(keys, wait_s=wait_s, pin_s=pin_s)
        except AgentError as error:
            return PrefetchOutcome(
                asked=asked, pending=asked, error=str(error), waited_s=self._clock() - began_s
            )
        return PrefetchOutcome(
            asked=asked,
            promoted=reply.resident + reply.promoted,
            pending=reply.pending,
            missing=reply.missing,
            promoted_bytes=reply.promoted_bytes,
            waited_s=self._clock() - began_s,
        )
