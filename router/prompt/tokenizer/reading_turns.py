"""The order in which long prompts are tokenized: one at a time, short ones before long ones.

The pieces of one prompt keep all cores busy. Several prompts at once would all be ready when
the last one is; one after the other, none is ready later, and most are ready sooner.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_CHARS_PER_S: Final = 5_000_000.0
"""About what one core tokenizes."""


class ReadingTurns:
    """Gives turns, one at a time.

    In order of when each prompt would be ready if it were alone. So none starves: it is passed
    only by prompts that arrive while it could have been read. For one event loop at a time.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._taken = False
        self._asked = 0

    @asynccontextmanager
    async def turn(self, chars: int) -> AsyncIterator[None]:
        """Wait for a turn to read so many characters, and hold it for the block."""
        if self._taken:
            await self._wait(chars)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, chars: int) -> None:
        loop = asyncio.get_running_loop()
        given = loop.create_future()
        self._asked += 1
        alone_s = loop.time() + chars / _CHARS_PER_S
        heapq.heappush(self._waiting, (alone_s, self._asked, given))
        try:
            await given
        except asyncio.CancelledError:
            # The turn may have come in that very turn of the loop.
            if not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            given = heapq.heappop(self._waiting)[2]
            if not given.done():  # else its client has gone
                given.set_result(None)
                return
        self._taken = False
