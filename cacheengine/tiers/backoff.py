"""How long a tier that failed is left alone. Pure bookkeeping."""

from typing import Final

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 60.0


class TierBackoff:
    """A pause after each failure, twice as long after each further one in a row."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S
        self._until_s = float("-inf")

    def is_on(self, now_s: float) -> bool:
        """Whether the tier is to be left alone."""
        return now_s < self._until_s

    def failed(self, now_s: float) -> None:
        """Begin a pause, unless one is on: then another operation of the same moment failed."""
        if not self.is_on(now_s):
            self._until_s = now_s + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_BACKOFF_S)

    def succeeded(self) -> None:
        """Make the next pause a short one. Does not end one that is on."""
        self._next_s = FIRST_BACKOFF_S
