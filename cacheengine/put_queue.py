"""How many puts may wait, and when there should be none. Pure bookkeeping."""

from typing import Final

_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 60.0


class PutQueue:
    """At most ``max_length`` puts queued or under way, and a rest after each failure.

    Rests get longer with each failure in a row. After the last for want of
    space a longest rest must pass before the tier may try to grow again.
    """

    def __init__(self, max_length: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._rest_s = _FIRST_REST_S
        self._rest_until_s = float("-inf")
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
        return now_s < self._rest_until_s

    def may_grow(self, now_s: float) -> bool:
        """Whether the last failure is long enough ago to use the whole capacity again."""
        return now_s >= self._grow_at_s

    def succeeded(self) -> None:
        """A put was stored: the next rest is a short one."""
        self._rest_s = _FIRST_REST_S

    def failed(self, now_s: float) -> None:
        """A put failed: rest."""
        self._grow_at_s = now_s + _LONGEST_REST_S
        if not self.is_resting(now_s):  # else another one of the same moment failed
            self._rest_until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def check(self) -> None:
        """Raise AssertionError if more is queued than may be."""
        assert 0 <= self.length <= self._max_length
