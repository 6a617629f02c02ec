"""Growing pauses after failures."""

import math


class Backoff:
    """How long to leave alone what has failed: first ``first_s``, then twice as long each time.

    No pause is longer than ``longest_s``. The caller gives the time, and locks where several
    threads call. A loop that sleeps by itself only needs `next_s` and `reset`.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until_s = -math.inf
        self._counted_s = -math.inf

    @property
    def is_failing(self) -> bool:
        """Whether a pause has grown since the last success."""
        return self._pause_s > 0

    def next_s(self) -> float:
        """Count one more failure in a row; return how long to pause."""
        self._pause_s = min(2 * self._pause_s or self._first_s, self._longest_s)
        return self._pause_s

    def failed(
        self,
        now_s: float,
        *,
        began_s: float | None = None,
        grows: bool = True,
        shortened_by: float = 0.0,
    ) -> None:
        """Start a pause.

        Several calls may fail at once: one whose call began (``began_s``) before the last counted
        failure changes nothing. Without ``began_s``, one during a pause changes nothing. With
        ``grows`` false the pause is ``first_s``. ``shortened_by`` is a share of the pause, for
        clients that should not return all at once.
        """
        if self.is_on(now_s) if began_s is None else began_s <= self._counted_s:
            return
        self._counted_s = now_s
        pause_s = self.next_s() if grows else self._first_s
        self._until_s = now_s + pause_s * (1 - shortened_by)

    def is_on(self, now_s: float) -> bool:
        """Whether a pause is on."""
        return now_s < self._until_s

    def left_s(self, now_s: float) -> float:
        """Return the seconds that are left of a pause, 0 without one."""
        return max(0.0, self._until_s - now_s)

    def may_try(self, now_s: float) -> bool:
        """Whether to call now. After a pause one caller may, and for as long again no other.

        So one call finds out whether the failure is over. If its caller never reports a result,
        the next one may try after that time.
        """
        if self.is_on(now_s):
            return False
        if self.is_failing:
            self._until_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        """Make the next pause a short one. A pause that is on stays on."""
        self._pause_s = 0.0

    def reset(self) -> None:
        """Forget all failures; end a pause that is on."""
        self._pause_s = 0.0
        self._until_s = -math.inf
        self._counted_s = -math.inf
