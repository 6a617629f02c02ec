"""Pauses between tries, and waits that have an end."""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Final

_FIRST_S: Final = 0.2
_LONGEST_S: Final = 2.0


class Pause:
    """Pauses between tries, growing until something works."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    @property
    def is_first(self) -> bool:
        """Whether this is the first failure in a row."""
        return self._next_s == _FIRST_S

    def next_s(self) -> float:
        """Return how long to pause now, longer than last time."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_S)
        return pause_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._next_s = _FIRST_S


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
