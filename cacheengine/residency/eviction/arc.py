"""ARC: the policy that learns from what it has evicted."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from cacheengine.residency.eviction.base import EvictionPolicy
from cacheengine.residency.eviction.queue import Queue


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
        self._once = Queue()
        self._again = Queue()
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
            self._again.append(key)
        elif key in self._again_ghosts:
            self._target = max(self._target - max(1.0, once / again), 0.0)
            del self._again_ghosts[key]
            self._again.append(key)
        else:
            self._once.append(key)
            self._trim_ghosts()

    def touch(self, key: bytes) -> None:
        """Make a key the most recent of those used again."""
        if key not in self._again:
            self._once.remove(key)
        self._again.append(key)

    def remove(self, key: bytes) -> None:
        """Forget a key without a trace."""
        self._queue_of(key).remove(key)

    def evict(self, key: bytes) -> None:
        """Forget a key, but not that it was here."""
        ghosts = self._again_ghosts if key in self._again else self._once_ghosts
        self.remove(key)
        ghosts[key] = None
        self._trim_ghosts()

    def candidates(self) -> Iterator[bytes]:
        """Yield the least recent of those used once down to the target, then of the others."""
        # Those passed over are among the least recent, and stay: they use up the excess first.
        excess = max(0, self._excess - self._once.passed)
        yield from islice(self._once.candidates(), excess)
        yield from self._again.candidates()
        yield from islice(self._once.candidates(), excess, None)

    def pass_over(self, key: bytes) -> None:
        """Leave a key out until `resume`; it counts as before."""
        self._queue_of(key).pass_over(key)

    def resume(self, key: bytes) -> None:
        """Put a key back in its place among those used once, or again."""
        self._queue_of(key).resume(key)

    def renewed(self) -> EvictionPolicy:
        """Return one with the same ghosts and the same target."""
        new = Arc(self._capacity)
        new._target = self._target
        new._once_ghosts, self._once_ghosts = self._once_ghosts, OrderedDict()
        new._again_ghosts, self._again_ghosts = self._again_ghosts, OrderedDict()
        return new

    def order(self) -> Iterator[bytes]:
        """Yield the least recent of those used once down to the target, then of the others."""
        excess = self._excess
        yield from islice(self._once, excess)
        yield from self._again
        yield from islice(self._once, excess, None)

    @property
    def _excess(self) -> int:
        """How many of those used once are to leave first."""
        return max(0, math.ceil(len(self._once) - self._target))

    def _queue_of(self, key: bytes) -> Queue:
        return self._again if key in self._again else self._once

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
