"""What is left of so many a minute."""

_MINUTE_S = 60.0


class Budget:
    """A bucket that holds a minute's worth, is full at first, and fills again evenly.

    One may go while there is one left, and may then take more than that: the debt is paid off
    before the next one goes. So nothing is too large ever to go, and the rate holds over time.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._most = float(per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._left = self._most
        self._at_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next one may go; 0 if that is now."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._left) / self._per_s)

    def take(self, count: int, now_s: float) -> None:
        """Note that so much was used."""
        self._fill(now_s)
        self._left -= count

    def _fill(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
