"""Keys in many small tables, so that all of them can be listed a small part at a time. Pure."""

from collections.abc import Collection, Iterable, Iterator
from typing import Final, Generic, TypeVar

V = TypeVar("V")

SHARDS: Final = 256
"""Tables: of a million keys each has four thousand, which are listed in 0.1 ms."""
_LISTED: Final = 1024
"""Entries after which a list ends with the table that it has come to."""


def part_of(key: bytes) -> int:
    """Return the number of the part that has a key, or would have it."""
    return hash(key) % SHARDS


class Shards(Generic[V]):
    """A table by key. Which of its parts has a key does not change while it is there."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: tuple[dict[bytes, V], ...] = tuple({} for _ in range(SHARDS))

    def of(self, key: bytes) -> dict[bytes, V]:
        """Return the part that has a key, or would have it."""
        return self.parts[part_of(key)]

    def listed_keys(self, first: int) -> tuple[list[bytes], int]:
        """Return the keys of the parts from number ``first`` on, and the number to go on with.

        Of few, all; of many, one part. `SHARDS`: there are no more.
        """
        listed: list[bytes] = []
        while first < SHARDS and len(listed) < _LISTED:
            listed += self.parts[first]
            first += 1
        return listed, first

    def listed(self, first: int) -> tuple[list[V], int]:
        """Return the values in the same way."""
        listed: list[V] = []
        while first < SHARDS and len(listed) < _LISTED:
            listed += self.parts[first].values()
            first += 1
        return listed, first

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[V]:
        """Yield all values; not for where there are many."""
        for part in self.parts:
            yield from part.values()


class TakenKeys(Collection[bytes]):
    """The keys of a table that does not change any more; `settle` lets go of its values."""

    __slots__ = ("_keys",)

    def __init__(self, table: Collection[bytes]) -> None:
        self._keys = table

    def settle(self) -> None:
        """Keep the keys alone."""
        self._keys = tuple(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class KnownKeys(Shards[None]):
    """The keys that followers of a tier's events know of: those stored and not removed since."""

    __slots__ = ()

    def add(self, keys: Iterable[bytes]) -> None:
        """Note that the tier has gained keys."""
        for key in keys:
            self.of(key)[key] = None

    def discard(self, keys: Iterable[bytes]) -> None:
        """Note that the tier has lost keys."""
        for key in keys:
            self.of(key).pop(key, None)

    def take(self) -> list[TakenKeys]:
        """Return all keys, part by part, and have none any more, in one step."""
        taken = [TakenKeys(part) for part in self.parts]
        self.parts = tuple({} for _ in range(SHARDS))
        return taken
