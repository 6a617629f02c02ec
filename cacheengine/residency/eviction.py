"""In which order chunks leave when room is needed.

A policy knows keys and their use, nothing else: whether a chunk may leave now
(it is neither held nor pinned) is decided by the index.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from sortedcontainers import SortedDict


class EvictionPolicy(ABC):
    """An order over keys. Every key is added once, then touched, then removed or evicted."""

    @abstractmethod
    def add(self, key: bytes) -> None:
        """Take in a key that is not known yet."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Note a use of a known key."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a known key, for reasons that say nothing about its worth."""

    def evict(self, key: bytes) -> None:
        """Forget a known key that made room; a policy may learn from its return."""
        self.remove(key)

    @abstractmethod
    def order(self) -> Iterator[bytes]:
        """Yield all keys, the one to evict first at the front."""

    @abstractmethod
    def __len__(self) -> int: ...


class Lru(EvictionPolicy):
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        """Take in a key as the most recent."""
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        """Make a key the most recent."""
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a key."""
        del self._keys[key]

    def order(self) -> Iterator[bytes]:
        """Yield the least recent first."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Mru(Lru):
    """Most recently used first: for scans longer than the cache."""

    def order(self) -> Iterator[bytes]:
        """Yield the most recent first."""
        return reversed(self._keys)


class Fifo(Lru):
    """Oldest first, used or not."""

    def touch(self, key: bytes) -> None:
        """Do nothing: use does not count."""


class Lfu(EvictionPolicy):
    """Least often used first; among equals, the least recent."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        # By number of uses, in ascending order.
        self._buckets: SortedDict[int, OrderedDict[bytes, None]] = SortedDict()

    def add(self, key: bytes) -> None:
        """Take in a key with no uses yet."""
        self._put(key, 0)

    def touch(self, key: bytes) -> None:
        """Count one more use."""
        uses = self._uses[key]
        self.remove(key)
        self._put(key, uses + 1)

    def remove(self, key: bytes) -> None:
        """Forget a key and its uses."""
        uses = self._uses.pop(key)
        bucket = self._buckets[uses]
        del bucket[key]
        if not bucket:
            del self._buckets[uses]

    def order(self) -> Iterator[bytes]:
        """Yield the least often used first."""
        for bucket in self._buckets.values():
            yield from bucket

    def __len__(self) -> int:
        return len(self._uses)

    def _put(self, key: bytes, uses: int) -> None:
        self._uses[key] = uses
        self._buckets.setdefault(uses, OrderedDict())[key] = None


class Arc(EvictionPolicy):
    """Used once against used again, in a proportion that the misses teach.

    After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead
    Replacement Cache", FAST 2003. Their T1 is ``_once``, T2 is ``_again``, B1
    and B2 (keys evicted from each, without bytes) are the ghosts, p is
    ``_target``. A scan of chunks that are not used again passes through
    ``_once`` and leaves ``_again`` alone.

    One difference: the index makes room before the policy sees what the room
    is for, and for several chunks at once. So a ghost's return moves the
    target for the next eviction, not for its own, and the paper's tie-break
    by the key to come (REPLACE, "x in B2") falls away.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is how many keys there can be; the ghosts are never more than that."""
        self._capacity = capacity
        # All four: least recent first.
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        # How many keys used once may stay when room is needed; up to the capacity.
        self._target = 0.0

    def add(self, key: bytes) -> None:
        """Take in a key: as new, or, if it was evicted not long ago, as used again."""
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self._target = min(self._target + max(1.0, again / once), self._capacity)
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._target = max(self._target - max(1.0, once / again), 0.0)
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
            self._trim_ghosts()

    def touch(self, key: bytes) -> None:
        """Make a key the most recent of those used again."""
        if key in self._again:
            self._again.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None

    def remove(self, key: bytes) -> None:
        """Forget a key without a trace."""
        if key in self._again:
            del self._again[key]
        else:
            del self._once[key]

    def evict(self, key: bytes) -> None:
        """Forget a key, but not that it was here."""
        ghosts = self._again_ghosts if key in self._again else self._once_ghosts
        self.remove(key)
        ghosts[key] = None
        self._trim_ghosts()

    def order(self) -> Iterator[bytes]:
        """Yield the least recent of those used once down to the target, then of the others."""
        excess = max(0, math.ceil(len(self._once) - self._target))
        yield from islice(self._once, excess)
        yield from self._again
        yield from islice(self._once, excess, None)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def ghosts(self) -> int:
        """How many evicted keys are remembered."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    def _trim_ghosts(self) -> None:
        # The paper's |T1| + |B1| <= c, and |B1| + |B2| <= c, which in a full
        # cache is its bound of 2c on all four, and holds in one that is not.
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and self.ghosts > self._capacity:
            self._again_ghosts.popitem(last=False)


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "LRU": lambda _: Lru(),
    "LFU": lambda _: Lfu(),
    "FIFO": lambda _: Fifo(),
    "MRU": lambda _: Mru(),
    "ARC": Arc,
}

POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Return an empty policy by its name in LMCache's ``cache_policy``, for so many keys."""
    return _POLICIES[name.upper()](capacity)
