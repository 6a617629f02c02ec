"""How many puts may wait, and when there should be none. Pure bookkeeping."""

from cacheengine.rest import LONGEST_REST_S, Rest


class PutQueue:
    """At most ``max_length`` puts queued or under way, and a rest after each failure.

    After the last failure a longest rest must pass before the tier may try to
    grow again.
    """

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._rest = Rest()
        self._grow_at_s = float("-inf")

    def enter(self, now_s: float) -> bool:
        """Take in one put; False when it must be dropped."""
        if self.is_resting(now_s) or self.length >= self._max_length:
            return False
        self.length += 1
        return True

    def leave(self) -> None:
        """One put is over, one way or another."""
        self.length -= 1

    def is_resting(self, now_s: float) -> bool:
        """Whether the tier is to be left alone."""
        return self._rest.is_on(now_s)

    def may_grow(self, now_s: float) -> bool:
        """Whether the last failure is long enough ago to use the whole capacity again."""
        return now_s >= self._grow_at_s

    def succeeded(self) -> None:
        """A put was stored: the next rest is a short one."""
        self._rest.succeeded()

    def failed(self, now_s: float) -> None:
        """A put failed: rest."""
        self._grow_at_s = now_s + LONGEST_REST_S
        self._rest.failed(now_s)

    def check(self) -> None:
        """Raise AssertionError if more is queued than may be."""
        assert 0 <= self.length <= self._max_length
