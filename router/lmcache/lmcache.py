"""LMCache's side of the router, put together for the application."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from router.fleet import Decision, Fleet, Replica
from router.index import PromptKeyCache
from router.lmcache.ask import Asker
from router.lmcache.coordinator import Coordinator, CoordinatorApi, L2Eviction
from router.lmcache.prefetch import LmcachePrefetch
from router.lmcache.stock import StockCoordinator
from router.lmcache.watch import ServerWatch
from router.lmcache.workers import LmcacheWorkers
from warmroute_common.agent_protocol import PrefetchReply


class Lmcache:
    """The servers that replicas use, between `listen`, `start` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        stock_url: str | None = None,
    ) -> None:
        """``stock_url`` is that of a stock coordinator, which is asked then."""
        self.coordinator = Coordinator(fleet)
        self._watch = ServerWatch(fleet, self.coordinator, session)
        self._prefetch = LmcachePrefetch(fleet, self.coordinator, session)
        self._stock: StockCoordinator | None = None
        if stock_url is not None:
            self._stock = StockCoordinator(
                stock_url,
                fleet,
                self.coordinator,
                session,
                members_changed=self._watch.members_changed,
            )
        self._eviction = L2Eviction(self.coordinator, session)
        config = fleet.config.lmcache_workers
        self.workers: LmcacheWorkers | None = None
        """LMCache inside vLLM; None where the configuration has none."""
        if config is not None:
            self.workers = LmcacheWorkers(fleet, config, self.coordinator.counts)
        self._asker = Asker(fleet, self.coordinator, session)
        self._api = CoordinatorApi(
            self.coordinator, session, members_changed=self._watch.members_changed
        )

    def __len__(self) -> int:
        """Return how many of the servers' keys are known."""
        return len(self.coordinator.directory)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters by name (`Coordinator.counts`)."""
        return self.coordinator.counts

    def listen(self) -> None:
        """Wait for workers; raise `ConfigError` where a port of theirs cannot be listened on."""
        if self.workers is not None:
            self.workers.listen()

    async def start(self) -> None:
        """Find out which servers answer, and go on watching them."""
        if self._stock is not None:
            await self._stock.start()
        await self._watch.start()
        self._eviction.start()

    async def stop(self) -> None:
        """End that."""
        if self._stock is not None:
            await self._stock.stop()
        await self._eviction.stop()
        await self._watch.stop()
        await self._asker.stop()
        if self.workers is not None:
            await self.workers.stop()

    def joined(self) -> None:
        """Find out about a replica that has joined the fleet."""
        self._watch.members_changed()
        if self.workers is not None:
            self.workers.registry.replicas_changed()

    def left(self, replica: Replica) -> None:
        """Forget a replica that is about to leave the fleet."""
        self._watch.left(replica.id)
        if self.workers is not None:
            self.workers.registry.replicas_changed(left=replica.id)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes of LMCache's coordinator."""
        return self._api.routes()

    def listing(self) -> list[dict[str, Any]]:
        """Return the servers and the workers' instances that have registered."""
        return self._api.listing() + ([] if self.workers is None else self.workers.listing())

    async def ask(self, keyring: PromptKeyCache) -> None:
        """Learn what servers hold of a prompt whose events were not all seen."""
        if self.workers is not None:
            self.workers.registry.asked(keyring)
        await (self._stock or self._asker).ask(keyring)

    def hung(self, replica_id: str) -> asyncio.Future[None] | None:
        """Return a future that is done when a replica hangs, its server having ended, or None."""
        return self._watch.hung(replica_id)

    async def prefetch(self, decision: Decision) -> PrefetchReply:
        """Have a decision's chunks promoted; raise `AgentError` where that cannot be."""
        return await self._prefetch.run(decision)
