"""LMCache in the router, put together: its servers, and its workers inside vLLM."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.prompt_keys import PromptKeyCache
from router.lmcache.coordinator import Coordinator
from router.lmcache.coordinator_api import CoordinatorApi
from router.lmcache.server_monitor import ServerMonitor
from router.lmcache.server_prefetch import GapRepair, ServerPrefetch
from router.lmcache.worker_service import LmcacheWorkers
from warmroute_common.agent_protocol import PrefetchReply


class Lmcache:
    """Runs between `listen`, `start` and `stop`."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.coordinator = Coordinator(fleet)
        self.monitor = ServerMonitor(fleet, self.coordinator, session)
        self._prefetch = ServerPrefetch(fleet, self.coordinator, session)
        self._repair = GapRepair(fleet, self.coordinator, session)
        self._api = CoordinatorApi(
            self.coordinator, session, servers_changed=self.monitor.servers_changed
        )
        config = fleet.config.lmcache_workers
        self.workers: LmcacheWorkers | None = None
        """LMCache inside vLLM; None if it is not configured."""
        if config is not None:
            self.workers = LmcacheWorkers(fleet, config, self.coordinator.counts)

    def __len__(self) -> int:
        """Return how many keys of servers are known."""
        return len(self.coordinator.directory)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters by name (`Coordinator.counts`)."""
        return self.coordinator.counts

    def listen(self) -> None:
        """Open the workers' ports; raise `ConfigError` if one cannot be opened."""
        if self.workers is not None:
            self.workers.listen()

    async def start(self) -> None:
        """Find out which servers answer, and keep watching them."""
        await self.monitor.start()

    async def stop(self) -> None:
        await self.monitor.stop()
        await self._repair.stop()
        if self.workers is not None:
            await self.workers.stop()

    def joined(self) -> None:
        """Look for the server or the workers of a replica that has joined the fleet."""
        self.monitor.servers_changed()
        if self.workers is not None:
            self.workers.registry.replicas_changed()

    def left(self, replica: Replica) -> None:
        """Forget a replica that is about to leave the fleet."""
        self.monitor.left(replica.id)
        if self.workers is not None:
            self.workers.registry.replicas_changed(left=replica.id)

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes of LMCache's coordinator."""
        return self._api.routes()

    def listing(self) -> list[dict[str, Any]]:
        """Return the registered servers and instances for ``GET /instances``."""
        return self._api.listing() + ([] if self.workers is None else self.workers.listing())

    async def look_up(self, prompt_keys: PromptKeyCache) -> None:
        """Before a prompt is placed: ask servers about it if their events were missed."""
        if self.workers is not None:
            self.workers.registry.prompt_placed(prompt_keys)
        await self._repair.look_up(prompt_keys)

    def hung(self, replica_id: str) -> asyncio.Future[None] | None:
        """See `ServerMonitor.hung`."""
        return self.monitor.hung(replica_id)

    async def prefetch(self, decision: Decision) -> PrefetchReply:
        """Promote a decision's chunks; raise `PrefetchError` if that fails."""
        return await self._prefetch.run(decision)
