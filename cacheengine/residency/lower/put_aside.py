"""Tables put aside whole, in one step, and emptied one key after the other. Pure."""

from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class PutAside(Generic[V]):
    """What an index held when all of it was cleared; no key is in two tables."""

    def __init__(self) -> None:
        self._tables: list[dict[bytes, V]] = []

    def add(self, table: dict[bytes, V]) -> None:
        """Put a table aside, which nothing else changes any more."""
        if table:
            self._tables.append(table)

    def pop(self, key: bytes) -> V | None:
        """Take a key out; None if it is not there."""
        for table in self._tables:
            if key in table:
                value = table.pop(key)
                self._tables = [each for each in self._tables if each]
                return value
        return None

    def popitem(self) -> tuple[bytes, V] | None:
        """Take some key out; None if there are no more."""
        if not self._tables:
            return None
        item = self._tables[-1].popitem()
        if not self._tables[-1]:
            self._tables.pop()
        return item

    def __contains__(self, key: bytes) -> bool:
        return any(key in table for table in self._tables)

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def values(self) -> Iterator[V]:
        """Yield all values; not for where there are many."""
        for table in self._tables:
            yield from table.values()

    def __iter__(self) -> Iterator[bytes]:
        for table in self._tables:
            yield from table
