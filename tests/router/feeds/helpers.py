"""What tests here share."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

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
        # A slow machine's agents are waited for, too.
        with patch("router.feeds.feeds._START_WAIT_S", 30.0):
            await feeds.start()
        try:
            yield fleet
        finally:
            await feeds.stop()
