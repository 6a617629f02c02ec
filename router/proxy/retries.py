"""Sending a request again: when its turn comes, within the budget of retries."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.proxy.retry_budget import RetryBudget, pause_s


class Retries:
    """The retries of one router's requests; those beyond the budget wait for their turn."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """``jitter`` returns random numbers from 0 to 1."""
        self.budget = RetryBudget()
        self._jitter = jitter
        self._line: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request as one that waits for its answer to begin."""
        self.budget.requests += 1
        self._let_in()
        try:
            yield
        finally:
            self.budget.requests -= 1

    async def enter(self, retry: int, within_s: float) -> bool:
        """Wait until the n-th retry of a request may go; return False if not ``within_s``.

        True takes a place, which `leave` gives back.
        """
        if not await self._take_place(within_s):
            return False
        try:
            await asyncio.sleep(pause_s(retry, self._jitter()))
        except BaseException:
            self.leave()
            raise
        return True

    def leave(self) -> None:
        """Give back a place."""
        self.budget.retries -= 1
        self._let_in()

    async def _take_place(self, within_s: float) -> bool:
        if not self._line and self.budget.has_room:
            self.budget.retries += 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException as error:
            # The place may have been given in the very turn of the loop in which the time ran
            # out or the client left: then nothing else would give it back.
            if turn.done() and not turn.cancelled():
                self.leave()
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def _let_in(self) -> None:
        while self._line and self.budget.has_room:
            turn = self._line.popleft()
            if not turn.done():  # else it waits no longer
                self.budget.retries += 1
                turn.set_result(None)
