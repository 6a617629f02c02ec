"""Waiting for events for a time, and ending tasks.

Called by staging, lmcache and feeds. Imports nothing of the router.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

__all__ = ["all_set", "end_all"]


async def all_set(events: Iterable[asyncio.Event], timeout_s: float) -> None:
    """Return when all of these have been set, or after ``timeout_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for each in events:
                await each.wait()


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when they have ended."""
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
