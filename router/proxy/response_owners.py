"""Which replica gave which response: ``previous_response_id`` binds hard.

A stored response lives in the memory of the replica that gave it, so a
follow-up can be answered nowhere else.
"""

from collections import OrderedDict


class Bindings:
    """A bounded table from response id to replica id; the least recently used goes first."""

    def __init__(self, max_entries: int = 100_000) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def bind(self, response_id: str, replica_id: str) -> None:
        """Remember which replica gave a response; forget the oldest beyond the limit."""
        self._replicas[response_id] = replica_id
        self._replicas.move_to_end(response_id)
        if len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)

    def replica_of(self, response_id: str | None) -> str | None:
        """Return the replica that gave a response, or None if it is not known (any more)."""
        if response_id is None or response_id not in self._replicas:
            return None
        self._replicas.move_to_end(response_id)
        return self._replicas[response_id]

    def __len__(self) -> int:
        return len(self._replicas)
