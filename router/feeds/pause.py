"""Pauses between tries."""

from typing import Final

_FIRST_S: Final = 0.2
_LONGEST_S: Final = 2.0


class Pause:
    """Pauses between tries, growing until something works."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    @property
    def is_first(self) -> bool:
        """Whether this is the first failure in a row."""
        return self._next_s == _FIRST_S

    def next_s(self) -> float:
        """Return how long to pause now, longer than last time."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_S)
        return pause_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._next_s = _FIRST_S
