"""Telling the picked replica to bring disk and remote KV into its CPU RAM, and waiting a little."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from router.agent_client import AgentClient, AgentError
from router.config import PrefetchConfig
from router.policy import Decision
from router.replica import Replica


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


class Prefetcher:
    """Runs the prefetch of a decision. A failed one is an outcome, never an error."""

    def __init__(
        self,
        config: PrefetchConfig,
        replicas: Mapping[str, Replica],
        session: aiohttp.ClientSession,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._session = session
        self._clock = clock

    async def run(self, decision: Decision) -> PrefetchOutcome:
        """Promote what the decision asks for; return after its gain or the cap at the latest.

        The promotion goes on at the replica after that.
        """
        asked = len(decision.prefetch_keys)
        agent_url = self._replicas[decision.replica_id].config.agent_url
        if not asked or agent_url is None or not self._config.enabled:
            return PrefetchOutcome(asked=0)
        began_s = self._clock()
        wait_s = min(decision.expected_gain_s, self._config.wait_cap_s)
        try:
            reply = await AgentClient(self._session, agent_url).prefetch(
                decision.prefetch_keys, wait_s=wait_s, pin_s=self._config.pin_s
            )
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
