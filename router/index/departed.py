"""Which keys replicas held before, and where and when each was last lost: `DepartedKeys`.

`PrefixIndex` notes here what is removed, so that a prompt that is computed again can be told from
one that nobody has sent before. Bounded: the keys that left first are forgotten first. Pure: time
comes with `DepartedKeys.pass_time`.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from router.index.prompt_keys import KvTier

_MOST_HOLDINGS: Final = 16
"""Holdings that were lost as a whole and are remembered; a look-up asks each of them."""


class Departure(NamedTuple):
    """How a key was last lost."""

    replica: int
    """The slot of the replica, or of a store that replicas share."""
    tier: KvTier
    left_s: float
    """When, to about a second."""
    is_whole: bool = False
    """Whether all of the replica's keys of this tier went at once: it was emptied or restarted, or
    the router lost its events."""


class DepartedKeys:
    """The last keys that left, at most ``max_keys`` of them.

    Keys that leave one by one are in two generations: when the young one is full, the old one is
    forgotten, and the young one becomes the old one. A holding that is lost as a whole is kept as
    the dictionary that it was.
    """

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self._now_s = 0.0
        self._departures: dict[tuple[int, KvTier], Departure] = {}
        """By replica and tier, that of keys which leave now one by one."""
        self._young: dict[int, Departure] = {}
        self._old: dict[int, Departure] = {}
        self._holdings: deque[tuple[Mapping[int, object], Departure]] = deque()
        self._in_holdings = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + self._in_holdings

    def __repr__(self) -> str:
        return f"<DepartedKeys {len(self)} of {self.max_keys}>"

    def pass_time(self, now_s: float) -> None:
        """Set the time of what leaves from now on."""
        self._now_s = now_s
        self._departures.clear()

    def left(self, replica: int, tier: KvTier, keys: Iterable[int]) -> None:
        """Note that keys left a tier of a replica."""
        young, room = self._young, self.max_keys // 4
        if (departure := self._departures.get((replica, tier))) is None:
            departure = self._departures[replica, tier] = Departure(replica, tier, self._now_s)
        for key in keys:  # as fast as any bulk update, for the few keys of an event
            young[key] = departure
        if len(young) >= room:
            if len(young) > room:  # many keys left together
                young = dict(islice(young.items(), room))
            self._old, self._young = young, {}

    def lost(self, replica: int, tier: KvTier, holding: Mapping[int, object]) -> None:
        """Note that all keys of a tier of a replica are gone; nobody changes ``holding`` any more.

        If the holding is larger than half of the limit, only that many of its keys are kept.
        """
        most = self.max_keys // 2
        if len(holding) > most:
            holding = dict.fromkeys(islice(holding, most))
        if not holding:
            return
        self._holdings.append((holding, Departure(replica, tier, self._now_s, is_whole=True)))
        self._in_holdings += len(holding)
        while self._in_holdings > most or len(self._holdings) > _MOST_HOLDINGS:
            self._in_holdings -= len(self._holdings.popleft()[0])

    def get(self, key: int) -> Departure | None:
        """Return how a key was last lost; None if that is not known. It may be held again."""
        found = self._young.get(key) or self._old.get(key)
        for holding, departure in reversed(self._holdings):
            if key in holding:
                is_later = found is None or departure.left_s > found.left_s
                return departure if is_later else found
        return found

    def check(self) -> None:
        """Raise AssertionError if the bound is not kept, or the sizes do not add up."""
        assert len(self) <= self.max_keys
        assert self._in_holdings == sum(len(holding) for holding, _ in self._holdings)
