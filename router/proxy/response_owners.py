"""Which replica keeps what: a response, a file, a batch.

It lives with the replica that made it, so what names its id can be answered nowhere else.
"""

from collections import OrderedDict
from collections.abc import Iterable


class Bindings:
    """A bounded table from such an id to its replica's; the least recently used goes first."""

    def __init__(self, max_entries: int = 100_000) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def bind(self, kept_id: str, replica_id: str) -> None:
        """Remember which replica keeps a thing; forget the oldest beyond the limit."""
        self._replicas[kept_id] = replica_id
        self._replicas.move_to_end(kept_id)
        if len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)

    def replica_of(self, ids: Iterable[str]) -> str | None:
        """Return the replica that keeps the first that is known, None where none is (any more)."""
        for each in ids:
            if (replica_id := self._replicas.get(each)) is not None:
                self._replicas.move_to_end(each)
                return replica_id
        return None

    def __len__(self) -> int:
        return len(self._replicas)
