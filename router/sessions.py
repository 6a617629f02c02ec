"""Which replica is a session's home. Pure state, bounded in number and time."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_SPILLS_TO_MOVE: Final = 2
"""After so many spilled turns in a row the session's KV is elsewhere: its home follows."""


@dataclass(slots=True)
class _Home:
    replica: int
    spills: int
    last_s: float


class Sessions:
    """Homes of sessions (`Replica.slot`), the least recently used forgotten first.

    ``evicted`` counts those forgotten for want of room, not of time.
    """

    def __init__(self, max_sessions: int, ttl_s: float) -> None:
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self.evicted = 0
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str, now_s: float) -> int | None:
        """Return a session's home, None if it has none (any more); changes nothing."""
        home = self._homes.get(session)
        return None if home is None or home.last_s + self.ttl_s <= now_s else home.replica

    def note(self, session: str, replica: int, now_s: float) -> None:
        """Note that a turn of a session goes to a replica."""
        self._expire(now_s)
        home = self._homes.get(session)
        if home is None:
            self._homes[session] = _Home(replica, 0, now_s)
        else:
            home.last_s = now_s
            home.spills = 0 if replica == home.replica else home.spills + 1
            if home.spills >= _SPILLS_TO_MOVE:
                home.replica, home.spills = replica, 0
        self._homes.move_to_end(session)
        if len(self._homes) > self.max_sessions:
            self._homes.popitem(last=False)
            self.evicted += 1

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        assert len(self._homes) <= self.max_sessions
        times = [home.last_s for home in self._homes.values()]
        assert times == sorted(times), "the least recently used does not stand first"
        assert all(home.spills < _SPILLS_TO_MOVE for home in self._homes.values())

    def _expire(self, now_s: float) -> None:
        while self._homes:
            session, home = next(iter(self._homes.items()))
            if home.last_s + self.ttl_s > now_s:
                return
            del self._homes[session]
