"""The order in which chunks leave a full tier: `Lru` and the scan-resistant `Arc`.

A policy knows keys and their uses, nothing else. Its caller decides what may leave now: a chunk
that is pinned, held, read or written is set aside until that ends.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final


class EvictionPolicy(ABC):
    """An order over keys. Each key is added once, touched, and then removed or evicted.

    A key that is set aside is still known, and can be touched, removed and evicted.
    """

    @abstractmethod
    def add(self, key: bytes) -> None:
        """Take in a key that is not known yet, as the most recent."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Note a use of a known key."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a known key, for reasons that say nothing about its value."""

    def evict(self, key: bytes) -> None:
        """Forget a known key that made room. A policy may learn from its return."""
        self.remove(key)

    @abstractmethod
    def set_aside(self, key: bytes) -> None:
        """Leave a known key out of the candidates until `put_back`. Idempotent."""

    @abstractmethod
    def put_back(self, key: bytes) -> None:
        """Make a key that was set aside a candidate again. No effect on any other key.

        It is the most recent if it was touched meanwhile; otherwise it is the next to leave, as
        it was when an eviction met it.
        """

    @abstractmethod
    def candidates(self) -> Iterator[bytes]:
        """Yield the keys that are not set aside, the one to evict first at the front."""

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether a key is known, set aside or not."""

    @abstractmethod
    def order(self) -> Iterator[bytes]:
        """Yield all keys: those set aside, then the candidates. For tests and checks."""

    @abstractmethod
    def __len__(self) -> int: ...


class Lru(EvictionPolicy):
    """Least recently used first."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[bytes, None] = OrderedDict()
        """The candidates."""
        self.aside: dict[bytes, bool] = {}
        """The keys that are set aside, and whether each was touched since."""

    def add(self, key: bytes) -> None:
        self.waiting[key] = None

    def touch(self, key: bytes) -> None:
        if key in self.waiting:
            self.waiting.move_to_end(key)
        else:
            self.aside[key] = True

    def remove(self, key: bytes) -> None:
        if self.aside.pop(key, None) is None:
            del self.waiting[key]

    def set_aside(self, key: bytes) -> None:
        if key not in self.aside:
            del self.waiting[key]
            self.aside[key] = False

    def put_back(self, key: bytes) -> None:
        was_touched = self.aside.pop(key, None)
        if was_touched is not None:
            self.waiting[key] = None
            self.waiting.move_to_end(key, last=was_touched)

    def candidates(self) -> Iterator[bytes]:
        return iter(self.waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self.waiting or key in self.aside

    def order(self) -> Iterator[bytes]:
        yield from self.aside
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.waiting) + len(self.aside)


class Arc(EvictionPolicy):
    """Keys used once compete with keys used again, in a proportion that the misses teach.

    After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
    FAST 2003. Their T1 is ``_once``, T2 is ``_again``, B1 and B2 (keys evicted from each, without
    bytes) are the ghosts, and p is ``_target``. A scan of chunks that are not used again passes
    through ``_once`` and leaves ``_again`` alone.

    One difference: the index makes room before the policy sees which key needs it, and for
    several chunks at once. So the return of a ghost moves the target for the next eviction, not
    for its own, and the paper's tie-break by the key to come (REPLACE, "x in B2") does not apply.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is the largest number of keys, and of ghosts."""
        self._capacity = capacity
        self._once, self._again = Lru(), Lru()
        # Least recent first.
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        # How many keys used once may stay when room is needed; at most the capacity.
        self._target = 0.0

    def add(self, key: bytes) -> None:
        """Take in a key as used once, or as used again if it was evicted a short time ago."""
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self._target = min(self._target + max(1.0, again / once), self._capacity)
            del self._once_ghosts[key]
            self._again.add(key)
        elif key in self._again_ghosts:
            self._target = max(self._target - max(1.0, once / again), 0.0)
            del self._again_ghosts[key]
            self._again.add(key)
        else:
            self._once.add(key)
            self._trim_ghosts()

    def touch(self, key: bytes) -> None:
        """Make a key the most recent of those used again."""
        if key in self._again.waiting:
            self._again.waiting.move_to_end(key)
        elif key in self._once.waiting:
            del self._once.waiting[key]
            self._again.add(key)
        else:
            self._once.aside.pop(key, None)
            self._again.aside[key] = True

    def remove(self, key: bytes) -> None:
        """Forget a key and leave no ghost."""
        self._list_of(key).remove(key)

    def evict(self, key: bytes) -> None:
        """Forget a key, but remember that it was here."""
        ghosts = self._again_ghosts if key in self._again else self._once_ghosts
        self.remove(key)
        ghosts[key] = None
        self._trim_ghosts()

    def set_aside(self, key: bytes) -> None:
        self._list_of(key).set_aside(key)

    def put_back(self, key: bytes) -> None:
        self._list_of(key).put_back(key)

    def candidates(self) -> Iterator[bytes]:
        """Yield the least recent of those used once down to the target, then of the others."""
        once = self._once.waiting
        excess = max(0, math.ceil(len(once) - self._target))
        yield from islice(once, excess)
        yield from self._again.waiting
        yield from islice(once, excess, None)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    def order(self) -> Iterator[bytes]:
        yield from self._once.aside
        yield from self._again.aside
        yield from self.candidates()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def ghosts(self) -> int:
        """How many evicted keys are remembered."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    def _list_of(self, key: bytes) -> Lru:
        return self._again if key in self._again else self._once

    def _trim_ghosts(self) -> None:
        # The paper's |T1| + |B1| <= c, and |B1| + |B2| <= c, which in a full cache is its bound
        # of 2c on all four, and also holds in one that is not full.
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and self.ghosts > self._capacity:
            self._again_ghosts.popitem(last=False)


DEFAULT_POLICY: Final = "ARC"
POLICY_NAMES: Final = (DEFAULT_POLICY, "LRU")


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Return an empty policy for ``capacity`` keys by its name in LMCache's ``cache_policy``."""
    return Lru() if name.upper() == "LRU" else Arc(capacity)
