"""Waiting on the agent's loop for what engine threads do."""

import asyncio
import contextlib
from typing import Final

from cacheengine.engine import CacheEngine
from cacheengine.residency import Promotion

MAX_WAIT_S: Final = 30.0
"""Longest that a call may ask to wait."""


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set ``event`` from an engine thread."""
    # RuntimeError: the agent stopped, and so did the waiting call.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


async def wait_for_promotion(promotion: Promotion, wait_s: float) -> None:
    """Return when the promotion is done, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    promotion.add_done_callback(lambda: wake(loop, done))
    await wait_for_event(done, wait_s)


async def wait_for_news(engine: CacheEngine, after: int, wait_s: float) -> None:
    """Return when the engine has an event later than ``after``, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    # The listener is there before the check, so an event between the two
    # still wakes this call.
    forget = engine.add_event_listener(lambda: wake(loop, news))
    try:
        if engine.last_seq <= after and wait_s > 0:
            await wait_for_event(news, wait_s)
    finally:
        forget()


async def wait_for_event(event: asyncio.Event, wait_s: float) -> None:
    """Return when ``event`` is set, or after ``wait_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
