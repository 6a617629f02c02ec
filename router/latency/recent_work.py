"""How busy a replica has been of late. Pure: no clock, no I/O."""

from math import exp

from router.config import DEFAULT, Judgment


class RecentWork:
    """How busy a replica has been of late."""

    def __init__(self, judgment: Judgment = DEFAULT) -> None:
        self._judgment = judgment
        self._busy_s = 0.0
        self._as_of_s = 0.0

    def note(self, busy_s: float, now_s: float) -> None:
        """Add a request that keeps the replica busy for so long."""
        self._busy_s = self._busy_s * self._kept(now_s) + busy_s
        self._as_of_s = now_s

    def share(self, now_s: float) -> float:
        """Return the recent requests' seconds in a second."""
        return self._busy_s * self._kept(now_s) / self._judgment.recent_s

    def _kept(self, now_s: float) -> float:
        return exp(min(0.0, self._as_of_s - now_s) / self._judgment.recent_s)

    def __repr__(self) -> str:
        return f"<RecentWork {self._busy_s:.3f} s as of {self._as_of_s:.3f}>"
