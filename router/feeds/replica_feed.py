"""Keeping the fleet informed: agents and KV events of every replica, for as long as it runs.

Each replica's KV events are followed by one task, and its agent, if it has one, by another;
neither ends by itself. Whatever fails is logged once, and tried again with growing pauses.
"""

import asyncio
from typing import Final

import aiohttp
import zmq.asyncio

from router.feeds.agent_feed import AgentFeed, poll_gap_s
from router.feeds.kv_feed import KvFeed
from router.feeds.kv_subscriber import SOCKETS_PER_REPLICA
from router.fleet import Fleet
from router.staging import AgentClient
from router.tasks import all_set, end_all

_START_WAIT_S: Final = 3.0


class Feeds:
    """All feeds of a fleet, between `start` and `stop`."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin, and wait a little so that the first request finds the agents' snapshots."""
        replicas = self._fleet.replicas.values()
        sockets = SOCKETS_PER_REPLICA * len(replicas) + self._context.get(zmq.MAX_SOCKETS)
        self._context.set(zmq.MAX_SOCKETS, min(sockets, self._context.get(zmq.SOCKET_LIMIT)))
        gap_s = poll_gap_s(sum(each.config.agent_url is not None for each in replicas))
        agents = []
        for replica in replicas:
            kv_feed = KvFeed(self._fleet, replica, self._session, self._context)
            self._tasks.append(asyncio.create_task(kv_feed.run()))
            if (url := replica.config.agent_url) is not None:
                client = AgentClient(self._session, url)
                agents.append(AgentFeed(self._fleet, replica, client, kv_feed.agent_told, gap_s))
        self._tasks += [asyncio.create_task(each.run()) for each in agents]
        await all_set((each.tried for each in agents), _START_WAIT_S)

    async def stop(self) -> None:
        """End all feeds; what they told stays in the fleet, but for the KV events."""
        await end_all(self._tasks)
        self._context.destroy(linger=0)
