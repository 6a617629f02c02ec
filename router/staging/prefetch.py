"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.fleet import Decision
from router.staging.agent_client import AgentError, StagingAgent
from router.staging.errand import Errands, Outcome, Timing

_ANSWER_SHARE: Final = 0.95
"""Of a request's wait: until then an agent is to answer, so that what it tells comes in time."""


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

    async def run(self, decision: Decision) -> PrefetchOutcome | None:
        """Promote what the decision asks for, if anything."""
        replica, keys = self._fleet.replicas[decision.replica_id], decision.prefetch_keys
        if not keys or replica.config.agent_url is None:
            return None
        agent = self._agents(replica.config.agent_url)
        return await self._run(
            replica.id,
            keys[0],
            decision.expected_gain_s,
            PrefetchOutcome(asked=len(keys), pending=len(keys)),
            lambda wait_s: self._promote(replica.id, agent, keys, wait_s),
        )

    async def _promote(
        self, replica_id: str, agent: StagingAgent, keys: Sequence[bytes], wait_s: float
    ) -> PrefetchOutcome:
        """Return what an agent says of these chunks; raises nothing."""
        asked, asked_s = len(keys), self._clock()
        try:
            reply = await agent.prefetch(
                keys, wait_s=_ANSWER_SHARE * wait_s, pin_s=self._config.pin_s
            )
        except AgentError as error:
            self._backoff.failed(replica_id, asked_s, error)
            return PrefetchOutcome(asked=asked, pending=asked, error=str(error))
        self._backoff.answered(replica_id)
        return PrefetchOutcome(
            asked=asked,
            promoted=reply.resident + reply.promoted,
            pending=reply.pending,
            missing=reply.missing,
            promoted_bytes=reply.promoted_bytes,
        )
