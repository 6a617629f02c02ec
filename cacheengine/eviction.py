"""In which order chunks leave when room is needed.

A policy knows keys and their use, nothing else: whether a chunk may leave now
(nobody holds or pins it) is the index's business.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Protocol

from sortedcontainers import SortedDict


class EvictionPolicy(Protocol):
    """An order over keys. Every key is added once, then touched, then removed."""

    def add(self, key: bytes) -> None:
        """Take in a key that is not known yet."""

    def touch(self, key: bytes) -> None:
        """Note a use of a known key."""

    def remove(self, key: bytes) -> None:
        """Forget a known key."""

    def order(self) -> Iterator[bytes]:
        """Yield all keys, the one to evict first at the front."""

    def __len__(self) -> int: ...


class Lru:
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


class Lfu:
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


_POLICIES: Final[dict[str, type[Lru] | type[Lfu]]] = {
    "LRU": Lru,
    "LFU": Lfu,
    "FIFO": Fifo,
    "MRU": Mru,
}

POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy:
    """Return an empty policy by its name in LMCache's ``cache_policy``."""
    return _POLICIES[name.upper()]()
