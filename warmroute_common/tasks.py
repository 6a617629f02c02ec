"""Wait for events with a timeout, end tasks, work through long sequences in slices."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

__all__ = ["all_set", "end_all", "in_slices"]

_SLICE: Final = 5_000

_T = TypeVar("_T")


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


async def in_slices(items: Sequence[_T]) -> AsyncIterator[Sequence[_T]]:
    """Yield a long sequence's parts in their order; other tasks have their turn between them."""
    for at in range(0, len(items), _SLICE):
        yield items[at : at + _SLICE]
        await asyncio.sleep(0)
