"""Keeping the fleet informed: agents and KV events of every replica, for as long as it runs.

Each replica's KV events are followed by one task, and its agent, if it has one, by another;
neither ends before the replica leaves the fleet. Whatever fails is logged once, and tried again
with growing pauses.
"""

import asyncio
from typing import Final

import aiohttp
import zmq.asyncio

from router.feeds.agent_feed import AgentFeed, poll_gap_s
from router.feeds.kv_feed import KvFeed
from router.fleet import Fleet, Replica
from router.staging import AgentClient
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.tasks import all_set, end_all

_START_WAIT_S: Final = 3.0


class Feeds:
    """All feeds of a fleet, between `start` and `stop`."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, secret: FleetSecret | None = None
    ) -> None:
        """``secret`` is shown to agents."""
        self._fleet = fleet
        self._session = session
        self._secret = secret
        self._context = zmq.asyncio.Context()
        # It must be told before the first socket, and allows 1023 altogether unless it is.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin, and wait a little so that the first request finds the agents' snapshots."""
        agents = [self.joined(each) for each in self._fleet.replicas.values()]
        await all_set((each.tried for each in agents if each is not None), _START_WAIT_S)

    def joined(self, replica: Replica) -> AgentFeed | None:
        """Begin to follow a replica of the fleet; return the feed of its agent, if it has one."""
        kv_feed = KvFeed(self._fleet, replica, self._session, self._context)
        tasks = self._tasks[replica] = [asyncio.create_task(kv_feed.run())]
        if (url := replica.config.agent_url) is None:
            return None
        client = AgentClient(self._session, url, self._secret)
        agent = AgentFeed(self._fleet, replica, client, kv_feed.agent_told, self._gap_s)
        tasks.append(asyncio.create_task(agent.run()))
        return agent

    def left(self, replica: Replica) -> None:
        """Follow a replica no longer."""
        for task in self._tasks.pop(replica):
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    async def stop(self) -> None:
        """End all feeds; what they told stays in the fleet, but for the KV events."""
        await end_all([*self._ending, *(each for tasks in self._tasks.values() for each in tasks)])
        self._context.destroy(linger=0)

    def _gap_s(self) -> float:
        agents = sum(each.config.agent_url is not None for each in self._tasks)
        return poll_gap_s(agents)
