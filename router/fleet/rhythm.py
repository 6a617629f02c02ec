"""When sessions with a regular rhythm will come again. Pure, bounded in number and time.

Agent loops wait for a tool, people read an answer: where the pauses between
the end of an answer and the next turn are alike, the next one can be foreseen.
"""

from collections import OrderedDict
from dataclasses import dataclass
from statistics import median
from typing import Final

_REMEMBERED: Final = 5
"""Pauses that an estimate is made of, the latest."""
_LEAST: Final = 3
"""Pauses that there must be."""
_REGULAR: Final = 0.25
"""A session is regular if half of its pauses are this near to their median."""
_LEAST_SPREAD: Final = 0.05
"""The spread assumed at least, as a part of the median: few pauses may be alike by chance."""
_SPREADS: Final = 3.0
"""The turn is expected within so many spreads before or after the median."""
_LEAD_S: Final = 2.0
"""What is read from disk or remote should be there so long before."""
_LONGEST_PIN_S: Final = 60.0
"""Who may come within a longer time than this would keep others' KV out of the CPU tier."""


@dataclass(frozen=True, slots=True)
class Expected:
    """When to prefetch for a session's next turn."""

    in_s: float
    pin_s: float
    """From then to the end of the time in which the turn is expected."""


@dataclass(slots=True)
class _Session:
    under_way: int = 0
    ended_s: float | None = None
    """When its latest answer ended; None while one is under way."""
    last_s: float = 0.0
    pauses_s: tuple[float, ...] = ()


class Rhythms:
    """The pauses of sessions, the least recently used of which is forgotten first."""

    def __init__(self, max_sessions: int, ttl_s: float) -> None:
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def came(self, session: str, now_s: float) -> None:
        """Note that a turn of a session has come."""
        self._expire(now_s)
        known = self._sessions.setdefault(session, _Session())
        if known.ended_s is not None:
            known.pauses_s = (*known.pauses_s, now_s - known.ended_s)[-_REMEMBERED:]
        known.under_way += 1
        known.ended_s, known.last_s = None, now_s
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)

    def ended(self, session: str, now_s: float) -> Expected | None:
        """Note that an answer has ended; return when the next turn is expected, if that is known.

        None for a session that is not regular, or has another turn under way.
        """
        known = self._sessions.get(session)
        if known is None:
            return None
        known.under_way = max(0, known.under_way - 1)
        if known.under_way:
            return None
        known.ended_s = now_s
        return _expected(known.pauses_s)

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        assert len(self._sessions) <= self.max_sessions
        for known in self._sessions.values():
            assert len(known.pauses_s) <= _REMEMBERED
            assert known.under_way == 0 or known.ended_s is None

    def _expire(self, now_s: float) -> None:
        while self._sessions:
            session, known = next(iter(self._sessions.items()))
            if known.last_s + self.ttl_s > now_s:
                return
            del self._sessions[session]


def _expected(pauses_s: tuple[float, ...]) -> Expected | None:
    if len(pauses_s) < _LEAST:
        return None
    middle_s = median(pauses_s)
    spread_s = median(abs(each - middle_s) for each in pauses_s)
    if spread_s > _REGULAR * middle_s:
        return None
    reach_s = _SPREADS * max(spread_s, _LEAST_SPREAD * middle_s)
    in_s = max(0.0, middle_s - reach_s - _LEAD_S)
    pin_s = middle_s + reach_s - in_s
    return None if pin_s > _LONGEST_PIN_S else Expected(in_s, pin_s)
