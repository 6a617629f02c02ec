"""Real engines with real agents behind the router's fleet, for tests of what moves KV."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp

from router.agent_client import AgentClient
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from tests.cacheengine.helpers import Bench
from tests.cacheengine.whole_replica import WholeReplica
from warmroute_common.keys import HashScheme, chunk_keys

BLOCK = 16
CHUNK = 256
TOKENS = list(range(CHUNK * 20 + 100))
CHAIN = HashScheme("sha256", "seed").chain(TOKENS, BLOCK)
CHUNKS = chunk_keys(CHAIN, CHUNK // BLOCK)
"""Of `TOKENS`: 20 of them."""


@dataclass(kw_only=True)
class RealFleet:
    """Replicas that run, named one, two, ..., and the router's view of them."""

    replicas: list[WholeReplica]
    fleet: Fleet
    session: aiohttp.ClientSession

    async def learn(self) -> None:
        """Take over what the agents tell now."""
        for name, whole in zip(list(self.fleet.replicas), self.replicas, strict=True):
            agent = AgentClient(self.session, whole.url)
            self.fleet.apply_info(name, await agent.info())
            self.fleet.apply_snapshot(name, await agent.snapshot())
            self.fleet.up(name)


@contextlib.asynccontextmanager
async def real_fleet(
    benches: Sequence[Bench], config: RouterConfig | None = None
) -> AsyncIterator[RealFleet]:
    """Run a replica on each engine, and make the router's fleet of them."""
    async with contextlib.AsyncExitStack() as stack:
        wholes = []
        for name, bench in zip(("one", "two", "three"), benches, strict=False):
            whole = await asyncio.to_thread(WholeReplica, name, bench)
            stack.push_async_callback(asyncio.to_thread, whole.stop)
            wholes.append(whole)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        replicas = tuple(
            ReplicaConfig(url=f"http://{name}", instance_id=name, agent_url=whole.url)
            for name, whole in zip(("one", "two", "three"), wholes, strict=False)
        )
        fleet = Fleet(config or RouterConfig(replicas=replicas))
        made = RealFleet(replicas=wholes, fleet=fleet, session=session)
        await made.learn()
        yield made
