"""The policies that look at one thing: when a chunk was used, or how often."""

from collections.abc import Iterator

from sortedcontainers import SortedDict

from cacheengine.residency.eviction.base import EvictionPolicy
from cacheengine.residency.eviction.queue import Queue


class Lru(EvictionPolicy):
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys = Queue()

    def add(self, key: bytes) -> None:
        """Take in a key as the most recent."""
        self._keys.append(key)

    def touch(self, key: bytes) -> None:
        """Make a key the most recent."""
        self._keys.append(key)

    def remove(self, key: bytes) -> None:
        """Forget a key."""
        self._keys.remove(key)

    def candidates(self) -> Iterator[bytes]:
        """Yield the least recent first."""
        return self._keys.candidates()

    def pass_over(self, key: bytes) -> None:
        """Leave a key out until `resume`."""
        self._keys.pass_over(key)

    def resume(self, key: bytes) -> None:
        """Put a key back in its place."""
        self._keys.resume(key)

    def renewed(self) -> EvictionPolicy:
        """Return an empty one: there is nothing to learn."""
        return type(self)()

    def order(self) -> Iterator[bytes]:
        """Yield the least recent first."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Mru(Lru):
    """Most recently used first: for scans longer than the cache.

    A key that comes back from being passed over is the most recent again.
    """

    def candidates(self) -> Iterator[bytes]:
        """Yield the most recent first."""
        return self._keys.latest()

    def resume(self, key: bytes) -> None:
        """Put a key back as the most recent."""
        if self._keys.is_passed(key):
            self._keys.append(key)

    def order(self) -> Iterator[bytes]:
        """Yield those passed over, then the most recent first."""
        keys, passed = list(self._keys), self._keys.passed
        yield from keys[:passed]
        yield from reversed(keys[passed:])


class Fifo(Lru):
    """Oldest first, used or not."""

    def touch(self, key: bytes) -> None:
        """Do nothing: use does not count."""


class Lfu(EvictionPolicy):
    """Least often used first; among equals, the least recent."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        # By number of uses, in ascending order: buckets with candidates, then buckets without.
        self._buckets: SortedDict[int, Queue] = SortedDict()
        self._passed_over: dict[int, Queue] = {}

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
        bucket = self._bucket(uses)
        bucket.remove(key)
        self._keep(uses, bucket)

    def candidates(self) -> Iterator[bytes]:
        """Yield the least often used first."""
        for bucket in self._buckets.values():
            yield from bucket.candidates()

    def pass_over(self, key: bytes) -> None:
        """Leave a key out until `resume`."""
        uses = self._uses[key]
        bucket = self._bucket(uses)
        bucket.pass_over(key)
        self._keep(uses, bucket)

    def resume(self, key: bytes) -> None:
        """Put a key back in its place among those used as often."""
        uses = self._uses.get(key)
        if uses is not None:
            bucket = self._bucket(uses)
            bucket.resume(key)
            self._keep(uses, bucket)

    def renewed(self) -> EvictionPolicy:
        """Return an empty one: uses are counted anew."""
        return Lfu()

    def order(self) -> Iterator[bytes]:
        """Yield the least often used first."""
        buckets = {**self._buckets, **self._passed_over}
        for uses in sorted(buckets):
            yield from buckets[uses]

    def __len__(self) -> int:
        return len(self._uses)

    def _put(self, key: bytes, uses: int) -> None:
        self._uses[key] = uses
        bucket = self._bucket(uses)
        bucket.append(key)
        self._keep(uses, bucket)

    def _bucket(self, uses: int) -> Queue:
        bucket = self._buckets.get(uses) or self._passed_over.get(uses)
        return Queue() if bucket is None else bucket

    def _keep(self, uses: int, bucket: Queue) -> None:
        """Put a bucket that has changed where it belongs; an empty one nowhere."""
        if bucket.has_candidates:
            self._passed_over.pop(uses, None)
            if uses not in self._buckets:
                self._buckets[uses] = bucket
            return
        self._buckets.pop(uses, None)
        if bucket:
            self._passed_over[uses] = bucket
        else:
            self._passed_over.pop(uses, None)
