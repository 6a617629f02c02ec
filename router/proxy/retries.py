"""Retries of requests: how many at once, and how long each waits before it is sent."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_SHARE: Final = 0.2
"""Retries, as a share of the requests that wait for their answer to begin. If more are retries,
most requests fail, and sending them to yet another replica makes that worse."""
_AT_LEAST: Final = 10
"""Retries that may always go: a fifth of a few requests is less than one."""
_LEAST_S: Final = 0.025
_MOST_S: Final = 0.25


class RetryBudget:
    """Counts the requests that wait for their answer to begin, and the retries among them."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0

    @property
    def has_capacity(self) -> bool:
        """Whether one more request may be retried now."""
        return self.retries < max(_AT_LEAST, _SHARE * self.requests)

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert 0 <= self.retries <= self.requests

    def __repr__(self) -> str:
        return f"<RetryBudget {self.retries} of {self.requests}>"


def pause_s(retry: int, jitter: float) -> float:
    """Return how long the n-th retry of a request (from 1 on) waits; ``jitter`` is from 0 to 1.

    The first goes at once, to another replica. If that fails too, the cause may be common to all
    replicas; then a random pause keeps requests that failed together from returning together.
    """
    return 0.0 if retry <= 1 else _LEAST_S + (_MOST_S - _LEAST_S) * jitter


class Retries:
    """The retries of one router. Retries beyond the budget wait, first come, first served."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """``jitter`` returns random numbers from 0 to 1."""
        self.budget = RetryBudget()
        self._jitter = jitter
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request as one that waits for its answer to begin."""
        self.budget.requests += 1
        self._admit_next()
        try:
            yield
        finally:
            self.budget.requests -= 1

    async def enter(self, retry: int, within_s: float) -> bool:
        """Wait until the n-th retry of a request may go; return False if it may not ``within_s``.

        After True the caller must call `leave`.
        """
        if not await self._reserve(within_s):
            return False
        try:
            await asyncio.sleep(pause_s(retry, self._jitter()))
        except BaseException:
            self.leave()
            raise
        return True

    def leave(self) -> None:
        """End a retry, so that the next may go."""
        self.budget.retries -= 1
        self._admit_next()

    async def _reserve(self, within_s: float) -> bool:
        if not self._waiting and self.budget.has_capacity:
            self.budget.retries += 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException as error:
            # The turn may have come in the same tick of the loop in which the time ran out or the
            # client left: then only this code can end the retry.
            if turn.done() and not turn.cancelled():
                self.leave()
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def _admit_next(self) -> None:
        while self._waiting and self.budget.has_capacity:
            turn = self._waiting.popleft()
            if not turn.done():  # done: it no longer waits
                self.budget.retries += 1
                turn.set_result(None)
