"""Preparing the picked replica for a request: prefetch and copy at once, and one short wait."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.config import RouterConfig
from router.fleet import Decision, Fleet, Replica
from router.staging.agent_client import Agents
from router.staging.backoff import Backoff
from router.staging.errand import Timing
from router.staging.peer_copy import Copier, CopyOutcome
from router.staging.prefetch import Prefetcher, PrefetchOutcome, Promote


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
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
        return all(each is None or each.timing is Timing.IN_TIME for each in outcomes)

    def headers(self) -> dict[str, str]:
        """Return the response headers that tell of it."""
        told = {"x-warmroute-prefetch": self.prefetch, "x-warmroute-copy": self.copy}
        return {name: str(value) for name, value in told.items() if value is not None}


class Preparer:
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
        self._backoff = backoff = Backoff(clock)
        self._prefetcher = Prefetcher(
            config.prefetch, fleet, agents, backoff, lmcache=lmcache, clock=clock
        )
        self._copier = Copier(config.prefetch, fleet, agents, backoff, clock=clock)

    async def prepare(self, decision: Decision) -> Preparation:
        """Bring up and copy what the decision asks for, and wait a little for it.

        For each at most its expected gain and ``prefetch.wait_cap_s``; it goes
        on at the replicas after that.
        """
        if not self._enabled or not (decision.is_staged or self._copier.coming(decision)):
            return Preparation()
        began_s = self._clock()
        prefetch, copy = await asyncio.gather(
            self._prefetcher.run(decision), self._copier.run(decision)
        )
        return Preparation(prefetch=prefetch, copy=copy, waited_s=self._clock() - began_s)

    def left(self, replica: Replica) -> None:
        """Forget what is known of a replica's agent: the replica has left the fleet."""
        self._backoff.forget(replica.id)

    async def stop(self) -> None:
        """End what is done in the background."""
        await self._prefetcher.stop()
        await self._copier.stop()
