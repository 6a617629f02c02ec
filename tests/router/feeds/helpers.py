"""What tests here share."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from router.config.settings import ReplicaConfig, RouterConfig
from router.feeds.feeds import Feeds
from router.fleet.fleet import Fleet


@contextlib.asynccontextmanager
async def feeding(**replica: Any) -> AsyncIterator[Fleet]:
    """Feed a fleet of one replica for the block."""
    config = ReplicaConfig(**({"url": "http://127.0.0.1:1"} | replica))
    fleet = Fleet(RouterConfig(replicas=(config,)))
    async with aiohttp.ClientSession() as session:
        feeds = Feeds(fleet, session)
        await feeds.start()
        try:
            yield fleet
        finally:
            await feeds.stop()
