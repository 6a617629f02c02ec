"""What a new session will cost by its later turns, which follow it to where it begins.

A replica that has been busy for the share r of its time, with requests of s seconds,
lets the next one wait for about ``s r / (1 - r)`` (as a queue with one server and
random arrivals does), and each session that is added makes those who are there
wait as much. So for n turns to come::

    growth = 2 n s r / (1 - r)

n is the mean of the sessions seen so far: all their later turns, by the sessions that are over
(the most likely mean of a geometric length, where not all were watched to their end). That a
session is over is the surer the longer it says nothing.

Without this ten agents with one prompt of tools all go to the replica that holds it:
each by itself would pay more elsewhere, once.

Pure: no clock, no I/O.
"""

from math import exp
from typing import Final

from router.config import DEFAULT, Judgment

_LEAST_SESSIONS: Final = 1.0
"""No fewer count as over: else a few that go on would be taken to go on without end."""


class RecentWork:
    """How busy a replica has been of late."""

    __slots__ = ("_as_of_s", "_busy_s", "_judgment", "_requests")

    def __init__(self, judgment: Judgment = DEFAULT) -> None:
        self._judgment = judgment
        self._busy_s = 0.0
        self._requests = 0.0
        self._as_of_s = 0.0

    def note(self, busy_s: float, now_s: float) -> None:
        """Add a request that keeps the replica busy for so long."""
        kept = self._kept(now_s)
        self._busy_s = self._busy_s * kept + busy_s
        self._requests = self._requests * kept + 1.0
        self._as_of_s = now_s

    def share(self, now_s: float) -> float:
        """Return the recent requests' seconds in a second."""
        return self._busy_s * self._kept(now_s) / self._judgment.recent_s

    def growth_s(self, turns_to_come: float, now_s: float) -> float:
        """Return what a session's turns to come would cost here; see the module."""
        if not self._requests or not turns_to_come:
            return 0.0
        share = min(self._judgment.most_share, self.share(now_s))
        mean_s = self._busy_s / self._requests
        return 2 * turns_to_come * mean_s * share / (1 - share)

    def _kept(self, now_s: float) -> float:
        return exp(min(0.0, self._as_of_s - now_s) / self._judgment.recent_s)

    def __repr__(self) -> str:
        return f"<RecentWork {self._busy_s:.3f} s as of {self._as_of_s:.3f}>"


class SessionLengths:
    """How many turns sessions have after their first."""

    __slots__ = ("_as_of_s", "_judgment", "_later_turns", "_open", "_over")

    def __init__(self, judgment: Judgment = DEFAULT) -> None:
        self._judgment = judgment
        self._later_turns = judgment.supposed_turns
        self._over = judgment.supposed_sessions
        self._open = 0.0
        self._as_of_s = 0.0

    def note(self, now_s: float, *, idle_s: float | None) -> None:
        """Count a session's first turn (None), or one so long after the one before."""
        ended = self._open * self._over_after(now_s - self._as_of_s)
        self._as_of_s = now_s
        # One that was taken for over in part, and comes back, is open again.
        back = 0.0 if idle_s is None else self._over_after(idle_s)
        kept = exp(-ended / self._judgment.remembered_sessions)
        self._open += (1.0 if idle_s is None else back) - ended
        self._over = max(_LEAST_SESSIONS, self._over * kept + ended - back)
        self._later_turns = self._later_turns * kept + (idle_s is not None)

    @property
    def turns_to_come(self) -> float:
        """How many more turns a session has that begins now, on average."""
        return self._later_turns / self._over

    def _over_after(self, idle_s: float) -> float:
        """Return how sure it is that a session is over that has been idle for so long."""
        return 1 - exp(-max(0.0, idle_s) / self._judgment.patience_s)

    def __repr__(self) -> str:
        return f"<SessionLengths {self._later_turns:.1f} / {self._over:.1f}>"
