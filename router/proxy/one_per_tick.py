"""One request after another: a request that has been placed is sent before the next is placed."""

import asyncio
from collections import deque


class Turnstile:
    """Lets one request through in each turn of the event loop, in the order of their arrival.

    To read and place a prompt takes a millisecond or two, to send it some turns of the loop.
    Without this, a hundred requests that arrive together would all be read and placed in one
    turn, before the first of them is sent and before any token under way is passed on.
    """

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def enter(self) -> None:
        """Return at once, or in a later turn if a request has been let through in this one."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            await turn
        else:
            self._take()

    def _take(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._taken = False
        while self._line:
            turn = self._line.popleft()
            if not turn.done():  # else its client has gone, and its handler was cancelled
                turn.set_result(None)
                self._take()
                return
