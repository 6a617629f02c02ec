"""Ending a stream on which nothing moves any more."""

import asyncio
import time
from collections.abc import Callable
from typing import Self


class IdleTimer:
    """Calls a function once nothing has moved for so long, while the ``with`` block runs.

    One timer for a stream, that looks anew when it is due: a timer for each piece would cost more
    than to pass the piece on.
    """

    def __init__(self, idle_s: float | None, on_idle: Callable[[bool], None]) -> None:
        """``idle_s`` is None for no limit; ``on_idle`` gets `is_writing`."""
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._timer: asyncio.TimerHandle | None = None
        self.moved_s = time.monotonic()
        """When something has moved last; this and the next are to be kept up to date."""
        self.is_writing = False
        """Whether it is the client's turn, which may take its time to read."""

    def __enter__(self) -> Self:
        if self._idle_s is not None:
            self._sleep(self._idle_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _sleep(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._idle_s is not None
        left_s = self.moved_s + self._idle_s - time.monotonic()
        if left_s > 0:
            self._sleep(left_s)
        else:
            self._on_idle(self.is_writing)
