"""How many retries there may be at once, and how long each waits before it is sent."""

from typing import Final

_SHARE: Final = 0.2
"""Of the requests that wait for their answer to begin. While more than that are retries, most of
what is sent fails, and to send it to the next replica too makes it worse."""
_AT_LEAST: Final = 10
"""So many retries may go in any case: of few requests a fifth is none."""
_LEAST_S: Final = 0.025
_MOST_S: Final = 0.25


class RetryBudget:
    """Counts the requests that wait for their answer to begin, and the retries among them."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0

    @property
    def has_room(self) -> bool:
        """Whether one more of the requests may be tried again now."""
        return self.retries < max(_AT_LEAST, _SHARE * self.requests)

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert 0 <= self.retries <= self.requests

    def __repr__(self) -> str:
        return f"<RetryBudget {self.retries} of {self.requests}>"


def pause_s(retry: int, jitter: float) -> float:
    """Return how long the n-th retry of a request (from 1 on) waits; ``jitter`` is from 0 to 1.

    The first goes at once, since it goes to another replica. If that failed too, it may be what
    they have in common, and requests that have failed together are not to come back together.
    """
    return 0.0 if retry <= 1 else _LEAST_S + (_MOST_S - _LEAST_S) * jitter
