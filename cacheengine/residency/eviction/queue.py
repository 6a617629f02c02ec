"""Keys in an order, some of them passed over for now: what every policy is made of. Pure."""

from collections import OrderedDict
from collections.abc import Iterator

from sortedcontainers import SortedDict


class Queue:
    """Keys in order; those passed over keep their place, but are not among the `candidates`.

    Candidates are passed over from the first on, and keys come in at the end: so those passed
    over, and those that have come back from that (`resume`), lie before all others, in the order
    of their passing.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # By rank, which is given with the first passing and kept until the key is used again.
        self._passed: dict[bytes, int] = {}
        self._resumed: SortedDict[int, bytes] = SortedDict()
        self._ranks: dict[bytes, int] = {}  # of those in _resumed
        self._next_rank = 0

    def __len__(self) -> int:
        return len(self._keys) + len(self._passed) + len(self._ranks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys or key in self._passed or key in self._ranks

    def append(self, key: bytes) -> None:
        """Take in a key at the end, or move it there."""
        if key in self._passed or key in self._ranks:
            self.remove(key)
        self._keys[key] = None
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a key."""
        if key in self._keys:
            del self._keys[key]
        elif self._passed.pop(key, None) is None:
            del self._resumed[self._ranks.pop(key)]

    def pass_over(self, key: bytes) -> None:
        """Leave a candidate out until `resume`; candidates are passed over in their order."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            del self._resumed[rank]
        else:
            del self._keys[key]
            self._next_rank += 1
            rank = self._next_rank
        self._passed[key] = rank

    def resume(self, key: bytes) -> None:
        """Make a key a candidate again, in its old place; nothing if it is one, or unknown."""
        rank = self._passed.pop(key, None)
        if rank is not None:
            self._ranks[key] = rank
            self._resumed[rank] = key

    @property
    def passed(self) -> int:
        """How many keys are passed over."""
        return len(self._passed)

    def is_passed(self, key: bytes) -> bool:
        """Whether a key is passed over."""
        return key in self._passed

    @property
    def has_candidates(self) -> bool:
        """Whether there are keys that are not passed over."""
        return bool(self._keys or self._ranks)

    def candidates(self) -> Iterator[bytes]:
        """Yield the keys that are not passed over, the first in order first."""
        yield from self._resumed.values()
        yield from self._keys

    def latest(self) -> Iterator[bytes]:
        """Yield the keys that are not passed over, the last in order first."""
        yield from reversed(self._keys)
        yield from reversed(self._resumed.values())

    def __iter__(self) -> Iterator[bytes]:
        """Yield all keys in order; not for where there are many."""
        places = {**{key: rank for rank, key in self._resumed.items()}, **self._passed}
        yield from sorted(places, key=places.__getitem__)
        yield from self._keys
