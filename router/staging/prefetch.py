"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from router.config import PrefetchConfig
from router.fleet import Decision, Fleet, Replica
from router.staging.agent_client import AgentError, Agents
from router.staging.backoff import Backoff
from router.staging.errand import Errands, Outcome, Timing
from warmroute_common.agent_protocol import PrefetchReply

_ANSWER_SHARE: Final = 0.95
"""Of a request's wait: until then an agent is to answer, so that what it tells comes in time."""

Promote = Callable[[Decision], Awaitable[PrefetchReply]]
"""Has LMCache promote a decision's chunks; raises `AgentError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOutcome(Outcome):
    """What became of the chunks; the counts add up to ``asked``. With an error all are pending."""

    promoted: int = 0
    """In the CPU tier now, including the ones that were there before."""
    pending: int = 0
    missing: int = 0
    promoted_bytes: int = 0

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


class Prefetcher(Errands[PrefetchOutcome]):
    """Has replicas promote chunks; the promotions go on at the replicas, waited for or not."""

    name = "prefetches"
    most = 1024

    def __init__(
        self,
        config: PrefetchConfig,
        fleet: Fleet,
        agents: Agents,
        backoff: Backoff,
        *,
        lmcache: Promote | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, fleet, agents, backoff, clock=clock)
        self._lmcache = lmcache

    async def run(self, decision: Decision) -> PrefetchOutcome | None:
        """Promote what the decision asks for, if anything."""
        replica, keys = self._fleet.replicas[decision.replica_id], decision.prefetch_keys
        if not keys or (replica.config.agent_url is None and self._lmcache is None):
            return None
        return await self._run(
            replica.id,
            keys[0],
            decision.expected_gain_s,
            PrefetchOutcome(asked=len(keys), pending=len(keys)),
            lambda wait_s: self._promote(replica, decision, wait_s),
        )

    async def _promote(
        self, replica: Replica, decision: Decision, wait_s: float
    ) -> PrefetchOutcome:
        """Return what is said of a decision's chunks where they are; raises nothing."""
        asked, asked_s = len(decision.prefetch_keys), self._clock()
        try:
            reply = await self._ask(replica, decision, wait_s)
        except AgentError as error:
            self._backoff.failed(replica.id, asked_s, error)
            return PrefetchOutcome(asked=asked, pending=asked, error=str(error))
        self._backoff.answered(replica.id)
        return PrefetchOutcome(
            asked=asked,
            promoted=reply.resident + reply.promoted,
            pending=reply.pending,
            missing=reply.missing,
            promoted_bytes=reply.promoted_bytes,
        )

    def _ask(self, replica: Replica, decision: Decision, wait_s: float) -> Awaitable[PrefetchReply]:
        """Ask whoever promotes chunks at a replica: its agent, or LMCache."""
        if replica.config.agent_url is None:
            assert self._lmcache is not None
            return self._lmcache(decision)
        return self._agents(replica.config.agent_url).prefetch(
            decision.prefetch_keys,
            wait_s=_ANSWER_SHARE * wait_s,
            pin_s=self._config.pin_s,
            lora=decision.picked.keys.lora,
        )
