"""Stage KV before a request is forwarded: promote it to CPU RAM, or copy it from another replica.

The bytes of a copy go from replica to replica: the router only gives the destination's agent the
source and the keys, and learns how fast the copy was. The request waits for both at most as long
as they gain. Agents (and LMCache servers) that hang or fail are left alone, each time for longer,
until they answer again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import urlsplit

from router.agent_client import AgentError, AgentRefusedError, Agents
from router.config.settings import PrefetchConfig, RouterConfig
from router.fleet.decision import Decision, KvCopy
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from warmroute_common.addresses import join_host_port
from warmroute_common.agent_protocol import MoveRequest, MoveSource, PrefetchReply
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.staging")

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 60.0


@dataclass(kw_only=True)
class _Failing:
    interval_s: float
    until_s: float
    """Until then its agent is not asked; afterwards by one request at a time."""
    known_s: float
    """When its last failure was known: calls made before that tell nothing new."""


class AgentBackoff:
    """Which replicas' agents may be asked now; logs when one begins to fail, and ends to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: dict[str, _Failing] = {}

    def may_ask(self, replica_id: str) -> bool:
        """Whether an agent may be asked; of a failing one only now and then."""
        failing = self._failing.get(replica_id)
        if failing is None:
            return True
        now_s = self._clock()
        if now_s < failing.until_s:
            return False
        # This request finds out; the others do without until it knows.
        failing.until_s = now_s + failing.interval_s
        return True

    def forget(self, replica_id: str) -> None:
        """Forget how a replica's agent failed: the replica has left the fleet."""
        self._failing.pop(replica_id, None)

    def answered(self, replica_id: str) -> None:
        """Note that an agent has answered."""
        if self._failing.pop(replica_id, None) is not None:
            log.info("staging KV at %s works again", replica_id)

    def failed(self, replica_id: str, asked_s: float, error: Exception) -> None:
        """Note that a call made at ``asked_s`` has failed."""
        now_s, failing = self._clock(), self._failing.get(replica_id)
        if failing is None:
            log.warning(
                "staging KV at %s fails (%s): it is not tried for %g s, and for up to %g s while "
                "it goes on failing; requests go there without",
                replica_id,
                error,
                _FIRST_S,
                _LONGEST_S,
            )
            interval_s = _FIRST_S
        elif asked_s <= failing.known_s:
            return
        else:
            interval_s = min(2 * failing.interval_s, _LONGEST_S)
        self._failing[replica_id] = _Failing(
            interval_s=interval_s, until_s=now_s + interval_s, known_s=now_s
        )


class StagingTiming(StrEnum):
    """What a request had of the KV that was asked for ahead of it."""

    IN_TIME = "in-time"
    """All of it was there when the request was forwarded."""
    LATE = "late"
    """The request was forwarded before."""
    FAILED = "failed"
    """Some of it will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOutcome:
    """What became of the chunks asked for by the time that the request was forwarded."""

    asked: int
    error: str | None = None
    """Why nothing is known of them, or not all came; or None."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    replica_id: str
    first_key: bytes
    until_s: float
    """When the request that asked for it continues without it."""


_Outcome = TypeVar("_Outcome", bound=StagingOutcome)


class AgentJobs(Generic[_Outcome]):
    """Errands of agents for requests. One that fails or is late is an outcome, never an error."""

    name: ClassVar[str]
    most: ClassVar[int]
    """So many are followed at once; one more is not begun."""

    def __init__(
        self,
        config: PrefetchConfig,
        fleet: Fleet,
        agents: Agents,
        backoff: AgentBackoff,
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
        """Stop following; the replicas finish what is in progress."""
        await end_all(list(self._under_way))

    async def _run(
        self,
        replica_id: str,
        first_key: bytes,
        gain_s: float,
        not_yet: _Outcome,
        job: Callable[[float], Coroutine[Any, Any, _Outcome]],
    ) -> _Outcome:
        """Return how a job ended, or ``not_yet`` after its gain or the cap.

        ``job`` gets the seconds that it is waited for. Then the job continues, followed.
        """
        if len(self._under_way) >= self.most:
            return replace(not_yet, error=f"{self.most} {self.name} are under way already")
        if not self._backoff.may_ask(replica_id):
            return replace(not_yet, error="not tried for a while, since it fails there")
        wait_s = min(gain_s, self._config.wait_cap_s)
        until_s = self._clock() + wait_s
        task = asyncio.create_task(job(wait_s))
        self._under_way[task] = _UnderWay(replica_id, first_key, until_s)
        task.add_done_callback(self._under_way.pop)
        # Not wait_for: it would cancel the task, which has yet to see whether the agent
        # answers at all, and how fast it was.
        await asyncio.wait({task}, timeout=wait_s)
        return task.result() if task.done() else not_yet


_ANSWER_SHARE: Final = 0.95
"""Share of a request's wait after which an agent must answer, so that the answer is in time."""

Promote = Callable[[Decision], Awaitable[PrefetchReply]]
"""Has LMCache promote a decision's chunks; raises `PrefetchError`."""


class PrefetchError(Exception):
    """LMCache could not be told to promote chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOutcome(StagingOutcome):
    """What became of the chunks; the counts add up to ``asked``. With an error all are pending."""

    promoted: int = 0
    """In the CPU tier now, including the ones that were there before."""
    pending: int = 0
    missing: int = 0
    promoted_bytes: int = 0

    @property
    def timing(self) -> StagingTiming:
        """Whether it was done when the request was forwarded."""
        if self.error is not None or self.missing:
            return StagingTiming.FAILED
        return StagingTiming.LATE if self.pending else StagingTiming.IN_TIME

    def __str__(self) -> str:
        return (
            f"asked={self.asked};promoted={self.promoted};"
            f"pending={self.pending};missing={self.missing}"
        )


class Prefetcher(AgentJobs[PrefetchOutcome]):
    """Has replicas promote chunks; the promotions go on at the replicas, waited for or not."""

    name = "prefetches"
    most = 1024

    def __init__(
        self,
        config: PrefetchConfig,
        fleet: Fleet,
        agents: Agents,
        backoff: AgentBackoff,
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
        except (AgentError, PrefetchError) as error:
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


_STALL_S: Final = 5.0
"""A source that hangs is given up after this time: the request may wait for what is on the way."""
_SOURCE_FAILED: Final = 502
"""What the destination's agent answers when the source is gone or refuses."""
_FOLLOW_S: Final = 25.0
"""How long a copy is followed that the request did not wait for; within an agent's longest wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome(StagingOutcome):
    """What became of a copy. ``asked`` counts the chunks that the destination had before, too."""

    source_id: str
    arrived: int = 0
    """Chunks of these at the destination then; 0 while the copy continues."""
    moved_bytes: int = 0
    pending: bool = False
    """Whether it went on, or nothing is known of it."""

    @property
    def timing(self) -> StagingTiming:
        """Whether it was done when the request was forwarded."""
        if self.pending and self.error is None:
            return StagingTiming.LATE
        return StagingTiming.IN_TIME if self.arrived == self.asked else StagingTiming.FAILED

    def __str__(self) -> str:
        return f"from={self.source_id};asked={self.asked};arrived={self.arrived};{self.timing}"


class PeerCopier(AgentJobs[CopyOutcome]):
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

        With each, when the request that asked for it continues without it.
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
        except Exception as error:
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
    return join_host_port(urlsplit(agent_url).hostname or "127.0.0.1", transfer_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingResult:
    """What a request's replica had got ready when the request was forwarded."""

    prefetch: PrefetchOutcome | None = None
    """None where nothing was to be prefetched."""
    copy: CopyOutcome | None = None
    """None where nothing was to be copied."""
    waited_s: float = 0.0

    @property
    def is_staged(self) -> bool:
        """Whether all KV that was asked for is in the replica's CPU RAM now."""
        outcomes = (self.prefetch, self.copy)
        return all(each is None or each.timing is StagingTiming.IN_TIME for each in outcomes)

    def headers(self) -> dict[str, str]:
        """Return the response headers that report it."""
        told = {"x-warmroute-prefetch": self.prefetch, "x-warmroute-copy": self.copy}
        return {name: str(value) for name, value in told.items() if value is not None}


class Stager:
    """Brings KV to replicas ahead of requests; what fails costs the request nothing but time."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        agents: Agents,
        clock: Callable[[], float] = time.monotonic,
        *,
        lmcache: Promote | None = None,
    ) -> None:
        """``lmcache`` prefetches where the KV is LMCache's."""
        self._enabled = config.prefetch.enabled
        self._clock = clock
        self._backoff = backoff = AgentBackoff(clock)
        self._prefetcher = Prefetcher(
            config.prefetch, fleet, agents, backoff, lmcache=lmcache, clock=clock
        )
        self._copier = PeerCopier(config.prefetch, fleet, agents, backoff, clock=clock)

    async def prepare(self, decision: Decision) -> StagingResult:
        """Bring up and copy what the decision asks for, and wait a little for it.

        For each at most its expected gain and ``prefetch.wait_cap_s``; it goes
        on at the replicas after that.
        """
        if not self._enabled or not (decision.is_staged or self._copier.coming(decision)):
            return StagingResult()
        began_s = self._clock()
        prefetch, copy = await asyncio.gather(
            self._prefetcher.run(decision), self._copier.run(decision)
        )
        return StagingResult(prefetch=prefetch, copy=copy, waited_s=self._clock() - began_s)

    def left(self, replica: Replica) -> None:
        """Forget what is known of a replica's agent: the replica has left the fleet."""
        self._backoff.forget(replica.id)

    async def stop(self) -> None:
        """End what is done in the background."""
        await self._prefetcher.stop()
        await self._copier.stop()
