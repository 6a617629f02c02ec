"""Which replica is the home of a session: a table bounded in number and time."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from math import inf
from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights

_EVICTION_SLACK: Final = 1024
"""A full table forgets 1/1024 of its sessions at once: finding the oldest one walks over deleted
entries."""

_MAX_OWNERS: Final = 4096
"""Of more owners the largest is not looked for: without keys clients choose these names too."""
_EXPIRIES_PER_TTL: Final = 64
_EXPIRED_AT_ONCE: Final = 2000
"""Limits one expiry to about a millisecond."""


class Sessions:
    """Homes of sessions (`Replica.serial`), the least recently used forgotten first.

    A full table forgets sessions of the key that has most of them, so that no key's clients can
    flush the sessions of another. A key's sessions begin with its name and ``/``
    (`Grant.own_session`). ``evicted`` counts the sessions forgotten because the table was full.
    """

    # A home is one integer, see `_pack`: the garbage collector does not visit integers. Visiting
    # a million objects would stop the router for 0.5 s.

    def __init__(
        self, max_sessions: int, ttl_s: float, weights: CostWeights = DEFAULT_WEIGHTS
    ) -> None:
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self.evicted = 0
        self._homes: dict[str, int] = {}
        self._owned: dict[str, dict[str, None]] = {}
        """The sessions of each key, in the same order."""
        self._at: Counter[int] = Counter()
        self._expire_next_s = -inf
        self._spills_to_move = weights.spills_to_move

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str, now_s: float) -> int | None:
        """Return a session's home, None if it has none or it has expired; changes nothing."""
        packed = self._homes.get(session)
        if packed is None:
            return None
        last_ms, replica, _ = _unpack(packed)
        return None if self._is_over(last_ms, now_s) else replica

    def note(self, session: str, replica: int, now_s: float) -> None:
        """Note that a turn of a session goes to a replica."""
        if now_s >= self._expire_next_s:
            self._expire(now_s)
        home, spills = replica, 0
        # Removed and inserted again, it is the last in order.
        packed = self._take_out(session)
        if packed is not None and not self._is_over(_unpack(packed)[0], now_s):
            _, former, spilled = _unpack(packed)
            if replica != former and spilled + 1 < self._spills_to_move:
                home, spills = former, spilled + 1
        self._put_last(session, home, spills, now_s)
        if len(self._homes) > self.max_sessions:
            self._evict(now_s)

    def answered(self, session: str, replica: int, now_s: float) -> None:
        """Note that a turn's answer has ended: the session's time counts from then on.

        If the session was forgotten in the meantime, the replica becomes its home.
        """
        if self.home(session, now_s) is None:
            self.note(session, replica, now_s)
        else:
            _, home, spills = _unpack(self._homes[session])
            self._take_out(session)
            self._put_last(session, home, spills, now_s)

    def forget(self, session: str) -> None:
        """Forget a session's home."""
        self._take_out(session)

    def at_home(self) -> Mapping[int, int]:
        """Return how many sessions have their home at each replica (`Replica.serial`)."""
        return self._at

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        assert len(self._homes) <= self.max_sessions
        homes = [_unpack(packed) for packed in self._homes.values()]
        times = [last_ms for last_ms, _, _ in homes]
        assert times == sorted(times), "the least recently used is not first"
        assert self._at == Counter(home for _, home, _ in homes)
        owned: dict[str, dict[str, None]] = {}
        for session in self._homes:
            owned.setdefault(_owner(session), {})[session] = None
        assert {name: [*each] for name, each in self._owned.items()} == {
            name: [*each] for name, each in owned.items()
        }
        assert all(spills < self._spills_to_move for _, _, spills in homes)

    def _put_last(self, session: str, home: int, spills: int, now_s: float) -> None:
        self._homes[session] = _pack(now_s, home, spills)
        self._owned.setdefault(_owner(session), {})[session] = None
        self._at[home] += 1

    def _take_out(self, session: str) -> int | None:
        packed = self._homes.pop(session, None)
        if packed is not None:
            _, home, _ = _unpack(packed)
            self._at[home] -= 1
            if not self._at[home]:
                del self._at[home]
            owned = self._owned[_owner(session)]
            del owned[session]
            if not owned:
                del self._owned[_owner(session)]
        return packed

    def _is_over(self, last_ms: int, now_s: float) -> bool:
        return last_ms / 1000 + self.ttl_s <= now_s

    def _expire(self, now_s: float) -> None:
        over: list[str] = []
        for session, packed in islice(self._homes.items(), _EXPIRED_AT_ONCE):
            if not self._is_over(_unpack(packed)[0], now_s):
                break
            over.append(session)
        for session in over:
            self._take_out(session)
        if len(over) < _EXPIRED_AT_ONCE:
            self._expire_next_s = now_s + self.ttl_s / _EXPIRIES_PER_TTL

    def _evict(self, now_s: float) -> None:
        self._expire(now_s)
        if len(self._homes) <= self.max_sessions:
            return
        of_all = len(self._owned) > _MAX_OWNERS
        most = self._homes if of_all else max(self._owned.values(), key=len)
        oldest = list(islice(most, 1 + self.max_sessions // _EVICTION_SLACK))
        for session in oldest:
            self._take_out(session)
        self.evicted += len(oldest)


def _owner(session: str) -> str:
    owner, slash, _ = session.partition("/")
    return owner if slash else ""


def _pack(last_s: float, replica: int, spills: int) -> int:
    return int(last_s * 1000) << 32 | replica << 1 | spills


def _unpack(packed: int) -> tuple[int, int, int]:
    """Return milliseconds, replica and spills (0 or 1)."""
    return packed >> 32, packed >> 1 & 0x7FFF_FFFF, packed & 1
