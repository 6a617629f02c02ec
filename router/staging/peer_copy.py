"""Having the picked replica copy KV from another one, and waiting a little.

The bytes go from replica to replica: the router tells the destination's agent
where to fetch what, and learns how fast that went.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from router.config import host_port
from router.fleet import Decision, KvCopy
from router.staging.agent_client import AgentError, AgentRefusedError
from router.staging.errand import Errands, Outcome, Timing
from warmroute_common.agent_protocol import MoveRequest, MoveSource

log = logging.getLogger("warmroute.copying")

_STALL_S: Final = 5.0
"""A source that hangs is given up after so long: the request may wait for what is on the way."""
_SOURCE_FAILED: Final = 502
"""What the destination's agent answers when the source is gone or refuses."""
_FOLLOW_S: Final = 25.0
"""How long a copy is followed that the request did not wait for; within an agent's longest wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome(Outcome):
    """What became of a copy. ``asked`` counts the chunks that the destination had before, too."""

    source_id: str
    arrived: int = 0
    """Chunks of these at the destination then; 0 while the copy goes on."""
    moved_bytes: int = 0
    pending: bool = False
    """Whether it went on, or nothing is known of it."""

    @property
    def timing(self) -> Timing:
        """Whether it was done when the request was forwarded."""
        if self.pending and self.error is None:
            return Timing.LATE
        return Timing.IN_TIME if self.arrived == self.asked else Timing.FAILED

    def __str__(self) -> str:
        return f"from={self.source_id};asked={self.asked};arrived={self.arrived};{self.timing}"


class Copier(Errands[CopyOutcome]):
    """Runs the copy of a decision; it is followed to its end, so that its rate is learned."""

    name = "copies"
    most = 256

    async def run(self, decision: Decision) -> CopyOutcome | None:
        """Copy what the decision asks for; without that, wait for a copy that brings its prompt."""
        wanted = decision.copy
        if wanted is None:
            await self._wait_for_coming(decision)
            return None
        not_yet = CopyOutcome(source_id=wanted.source_id, asked=len(wanted.keys), pending=True)
        return await self._run(
            decision.replica_id,
            wanted.keys[0],
            wanted.expected_gain_s,
            not_yet,
            lambda _: self._copy(decision, wanted, not_yet),
        )

    def coming(self, decision: Decision) -> dict[asyncio.Task[CopyOutcome], float]:
        """Return the copies under way that bring some of its prompt to the picked replica.

        With each, when the request that asked for it goes on without it.
        """
        return {
            task: copy.until_s
            for task, copy in self._under_way.items()
            if copy.replica_id == decision.replica_id
            and copy.first_key in decision.picked.keys.chain
        }

    async def _wait_for_coming(self, decision: Decision) -> None:
        """Wait for copies that another request of the same beginning waits for, as long as that.

        Sent before it, this one would have the replica compute what is on the way there: it
        was placed as if that KV were there already.
        """
        coming = self.coming(decision)
        wait_s = max(coming.values(), default=0.0) - self._clock()
        if wait_s > 0:
            await asyncio.wait(coming, timeout=wait_s)

    async def _copy(self, decision: Decision, wanted: KvCopy, not_yet: CopyOutcome) -> CopyOutcome:
        """Return how a copy ended, having told the fleet; raises nothing."""
        destination_id = decision.replica_id
        began_s = self._clock()
        failed_id = wanted.source_id
        try:
            outcome = await self._follow(decision, wanted, not_yet)
        except AgentRefusedError as refusal:
            self._backoff.answered(destination_id)
            if refusal.status != _SOURCE_FAILED:
                failed_id = destination_id
            outcome = replace(not_yet, error=str(refusal))
        except AgentError as error:
            self._backoff.failed(destination_id, began_s, error)
            failed_id = destination_id
            outcome = replace(not_yet, error=str(error))
        except Exception as error:  # the request must be forwarded whatever happened here
            log.exception("a copy of KV to %s failed", destination_id)
            outcome = replace(not_yet, error=f"{type(error).__name__}: {error}")
        now_s = self._clock()
        if outcome.moved_bytes and outcome.error is None:
            self._fleet.observed_copy(destination_id, outcome.moved_bytes, now_s - began_s)
        elif outcome.error is not None and not outcome.moved_bytes:
            log.info("copying KV from %s failed: %s", wanted.source_id, outcome.error)
            self._fleet.copy_failed(failed_id, now_s)
        return outcome

    async def _follow(
        self, decision: Decision, wanted: KvCopy, not_yet: CopyOutcome
    ) -> CopyOutcome:
        destination_id = decision.replica_id
        source = self._fleet.replicas[wanted.source_id]
        destination = self._fleet.replicas[destination_id]
        agent_url = destination.config.agent_url
        if agent_url is None or source.config.agent_url is None or source.transfer_port is None:
            return replace(not_yet, error="one of the two replicas cannot exchange KV")
        agent = self._agents(agent_url)
        request = MoveRequest(
            source=MoveSource(
                agent_url=source.config.agent_url,
                transfer_address=transfer_address(source.config.agent_url, source.transfer_port),
                tier=None,
            ),
            keys=[key.hex() for key in wanted.keys],
            lora=decision.picked.keys.lora,
            copy=True,
            pin_s=self._config.pin_s,
            stall_s=_STALL_S,
        )
        event_id = (await agent.move(request)).event_id
        self._backoff.answered(destination_id)
        status = await agent.move_status(event_id, wait_s=_FOLLOW_S)
        over = status.state != "running"
        return replace(
            not_yet,
            arrived=status.arrived_chunks if over else 0,
            moved_bytes=status.moved_bytes,
            pending=not over,
            error=status.error or None,
        )


def transfer_address(agent_url: str, transfer_port: int) -> str:
    """Return where other replicas fetch the chunks of an agent's replica."""
    return host_port(urlsplit(agent_url).hostname or "127.0.0.1", transfer_port)
