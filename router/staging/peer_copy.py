"""Having the picked replica copy KV from another one, and waiting a little.

The bytes go from replica to replica: the router tells the destination's agent
where to fetch what, and learns how fast that went.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol
from urllib.parse import urlsplit

from cacheengine.wire import MoveRequest, MoveSource
from router.config import PrefetchConfig, host_port
from router.fleet import Decision, KvCopy, Replica
from router.staging.agent_client import AgentError, AgentRefused, Agents
from router.staging.backoff import Backoff
from router.staging.prefetch import Timing

log = logging.getLogger("warmroute.copying")

MAX_UNDER_WAY: Final = 256
"""Copies that are followed at once; one more is not begun."""
_STALL_S: Final = 5.0
"""A source that hangs is given up after so long: the request may wait for what is on the way."""
_SOURCE_FAILED: Final = 502
"""What the destination's agent answers when the source is gone or refuses."""
_FOLLOW_S: Final = 25.0
"""How long a copy is followed that the request did not wait for; within an agent's longest wait."""


class CopyListener(Protocol):
    """What is told of copies, to learn from them (`router.fleet.Fleet`)."""

    def observed_copy(self, replica_id: str, nbytes: int, seconds: float) -> None:
        """Hear how long a replica took to get so many bytes from another."""

    def copy_failed(self, replica_id: str, now_s: float) -> None:
        """Hear at which replica a copy failed of which nothing came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """What became of a copy by the time that the request was forwarded."""

    source_id: str
    asked: int
    """Chunks, including the ones that the destination had before."""
    arrived: int = 0
    """Chunks of these at the destination then; 0 while the copy goes on."""
    moved_bytes: int = 0
    waited_s: float = 0.0
    pending: bool = False
    """Whether it went on."""
    error: str | None = None
    """Why not all arrived, or None."""

    @property
    def timing(self) -> Timing:
        """Whether it was done when the request was forwarded."""
        if self.pending:
            return Timing.LATE
        return Timing.IN_TIME if self.arrived == self.asked else Timing.FAILED

    def __str__(self) -> str:
        return f"from={self.source_id};asked={self.asked};arrived={self.arrived};{self.timing}"


@dataclass(frozen=True, slots=True)
class _UnderWay:
    destination_id: str
    first_key: bytes
    until_s: float
    """When the request that asked for it goes on without it."""


class Copier:
    """Runs the copy of a decision. A failed or late one is an outcome, never an error."""

    def __init__(
        self,
        config: PrefetchConfig,
        replicas: Mapping[str, Replica],
        agents: Agents,
        listener: CopyListener,
        backoff: Backoff,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._agents = agents
        self._listener = listener
        self._backoff = backoff
        self._clock = clock
        self._under_way: dict[asyncio.Task[CopyOutcome], _UnderWay] = {}

    async def run(self, decision: Decision) -> CopyOutcome | None:
        """Copy what the decision asks for; return after its gain or the cap at the latest.

        None where there is nothing to copy. The copy goes on after that, and
        is followed so that its rate is learned.
        """
        wanted = decision.copy
        if not self._config.enabled:
            return None
        if wanted is None:
            await self._wait_for_coming(decision)
            return None
        not_yet = CopyOutcome(source_id=wanted.source_id, asked=len(wanted.keys))
        if len(self._under_way) >= MAX_UNDER_WAY:
            return replace(not_yet, error=f"{MAX_UNDER_WAY} copies are under way already")
        if not self._backoff.may_ask(decision.replica_id):
            return replace(not_yet, error="its agent is left alone, since it fails")
        began_s = self._clock()
        task = asyncio.create_task(self._copy(decision.replica_id, wanted, not_yet))
        wait_s = min(wanted.expected_gain_s, self._config.wait_cap_s)
        self._under_way[task] = _UnderWay(decision.replica_id, wanted.keys[0], began_s + wait_s)
        task.add_done_callback(self._under_way.pop)
        # Not wait_for: it would cancel the task, which has yet to see how fast it was.
        await asyncio.wait({task}, timeout=wait_s)
        outcome = task.result() if task.done() else replace(not_yet, pending=True)
        return replace(outcome, waited_s=self._clock() - began_s)

    def is_coming(self, decision: Decision) -> bool:
        """Whether a copy is under way that brings some of its prompt to the picked replica."""
        return bool(self._coming(decision))

    def _coming(self, decision: Decision) -> dict[asyncio.Task[CopyOutcome], _UnderWay]:
        return {
            task: copy
            for task, copy in self._under_way.items()
            if copy.destination_id == decision.replica_id
            and copy.first_key in decision.picked.keys.chain
        }

    async def _wait_for_coming(self, decision: Decision) -> None:
        """Wait for copies that another request of the same beginning waits for, as long as that.

        Sent before it, this one would have the replica compute what is on the way there: it
        was placed as if that KV were there already.
        """
        coming = self._coming(decision)
        wait_s = max((copy.until_s for copy in coming.values()), default=0.0) - self._clock()
        if wait_s > 0:
            await asyncio.wait(coming, timeout=wait_s)

    async def stop(self) -> None:
        """Follow no copy any more; those under way go on between the replicas."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _copy(self, destination_id: str, wanted: KvCopy, not_yet: CopyOutcome) -> CopyOutcome:
        """Return how a copy ended, having told the listener; raises nothing."""
        began_s = self._clock()
        failed_id = wanted.source_id
        try:
            outcome = await self._follow(destination_id, wanted, not_yet)
        except AgentRefused as refusal:
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
            self._listener.observed_copy(destination_id, outcome.moved_bytes, now_s - began_s)
        elif outcome.error is not None and not outcome.moved_bytes:
            log.info("copying KV from %s failed: %s", wanted.source_id, outcome.error)
            self._listener.copy_failed(failed_id, now_s)
        return outcome

    async def _follow(
        self, destination_id: str, wanted: KvCopy, not_yet: CopyOutcome
    ) -> CopyOutcome:
        source = self._replicas[wanted.source_id]
        destination = self._replicas[destination_id]
        agent_url = destination.config.agent_url
        if agent_url is None or source.config.agent_url is None or source.transfer_port is None:
            return replace(not_yet, error="one of the two replicas cannot exchange KV")
        agent = self._agents(agent_url)
        request = MoveRequest(
            source=MoveSource(
                agent_url=source.config.agent_url,
                transfer_address=_transfer_address(source.config.agent_url, source.transfer_port),
                tier=None,
            ),
            keys=[key.hex() for key in wanted.keys],
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


def _transfer_address(agent_url: str, transfer_port: int) -> str:
    return host_port(urlsplit(agent_url).hostname or "127.0.0.1", transfer_port)
