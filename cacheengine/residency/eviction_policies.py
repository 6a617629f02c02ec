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
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # Set aside, and whether touched since.
        self._aside: dict[bytes, bool] = {}

    def add(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)
        else:
            self._aside[key] = True

    def remove(self, key: bytes) -> None:
        if self._aside.pop(key, None) is None:
            del self._keys[key]

    def set_aside(self, key: bytes) -> None:
        if key not in self._aside:
            del self._keys[key]
            self._aside[key] = False

    def put_back(self, key: bytes) -> None:
        was_touched = self._aside.pop(key, None)
        if was_touched is not None:
            _insert(self._keys, key, as_last=was_touched)

    def candidates(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys or key in self._aside

    def order(self) -> Iterator[bytes]:
        yield from self._aside
        yield from self._keys

    def __len__(self) -> int:
        return len(self._keys) + len(self._aside)


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
        # All four: least recent first.
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        # Set aside, and whether touched since.
        self._once_aside: dict[bytes, bool] = {}
        self._again_aside: dict[bytes, bool] = {}
        # How many keys used once may stay when room is needed; at most the capacity.
        self._target = 0.0

    def add(self, key: bytes) -> None:
        """Take in a key as used once, or as used again if it was evicted a short time ago."""
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
        elif key in self._once:
            del self._once[key]
            self._again[key] = None
        else:
            self._once_aside.pop(key, None)
            self._again_aside[key] = True

    def remove(self, key: bytes) -> None:
        """Forget a key and leave no ghost."""
        for aside in (self._once_aside, self._again_aside):
            if aside.pop(key, None) is not None:
                return
        del self._queue_of(key)[key]

    def evict(self, key: bytes) -> None:
        """Forget a key, but remember that it was here."""
        is_again = key in self._again or key in self._again_aside
        self.remove(key)
        (self._again_ghosts if is_again else self._once_ghosts)[key] = None
        self._trim_ghosts()

    def set_aside(self, key: bytes) -> None:
        if key in self._again:
            del self._again[key]
            self._again_aside[key] = False
        elif key in self._once:
            del self._once[key]
            self._once_aside[key] = False

    def put_back(self, key: bytes) -> None:
        for aside, queue in ((self._once_aside, self._once), (self._again_aside, self._again)):
            was_touched = aside.pop(key, None)
            if was_touched is not None:
                _insert(queue, key, as_last=was_touched)

    def candidates(self) -> Iterator[bytes]:
        """Yield the least recent of those used once down to the target, then of the others."""
        excess = max(0, math.ceil(len(self._once) - self._target))
        yield from islice(self._once, excess)
        yield from self._again
        yield from islice(self._once, excess, None)

    def __contains__(self, key: bytes) -> bool:
        return any(key in keys for keys in self._all)

    def order(self) -> Iterator[bytes]:
        yield from self._once_aside
        yield from self._again_aside
        yield from self.candidates()

    def __len__(self) -> int:
        return sum(map(len, self._all))

    @property
    def ghosts(self) -> int:
        """How many evicted keys are remembered."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    @property
    def _all(self) -> tuple[dict[bytes, bool] | OrderedDict[bytes, None], ...]:
        return (self._once, self._again, self._once_aside, self._again_aside)

    def _queue_of(self, key: bytes) -> OrderedDict[bytes, None]:
        return self._again if key in self._again else self._once

    def _trim_ghosts(self) -> None:
        # The paper's |T1| + |B1| <= c, and |B1| + |B2| <= c, which in a full cache is its bound
        # of 2c on all four, and also holds in one that is not full.
        once = len(self._once) + len(self._once_aside)
        while self._once_ghosts and once + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and self.ghosts > self._capacity:
            self._again_ghosts.popitem(last=False)


def _insert(queue: OrderedDict[bytes, None], key: bytes, *, as_last: bool) -> None:
    queue[key] = None
    if not as_last:
        queue.move_to_end(key, last=False)


DEFAULT_POLICY: Final = "ARC"
POLICY_NAMES: Final = (DEFAULT_POLICY, "LRU")


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Return an empty policy for ``capacity`` keys by its name in LMCache's ``cache_policy``."""
    return Lru() if name.upper() == "LRU" else Arc(capacity)
