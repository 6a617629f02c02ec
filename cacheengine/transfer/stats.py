"""What transfers count. Every counter is defined on its line."""

import dataclasses
import threading
from dataclasses import dataclass

from cacheengine.record import counter


@dataclass(slots=True)
class TransferStats:
    """Counts since the replica's start; bytes are payload bytes."""

    sent_chunks: int = counter("Chunks sent to other replicas.")
    sent_bytes: int = counter("Bytes sent to other replicas.")
    send_missing: int = counter("Chunks asked for by another replica that could not be read here.")
    send_refused: int = counter("Connections refused: another layout or version, too many.")
    send_failures: int = counter("Connections of other replicas that broke or made no sense.")
    received_chunks: int = counter("Chunks fetched whole from other replicas.")
    received_bytes: int = counter("Bytes fetched from other replicas.")
    receive_corrupt: int = counter("Chunks that came damaged, and were not kept.")
    receive_failures: int = counter("Connections to other replicas that were refused or broke.")
    moves: int = counter("Moves into this replica that were begun.")
    moves_failed: int = counter(
        "Moves of which not all arrived, or the source did not drop what it was to lose."
    )


class TransferMeter:
    """One replica's `TransferStats`, added to by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()

    def add(self, name: str, count: int = 1) -> None:
        """Add to the counter of that name."""
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + count)

    def stats(self) -> TransferStats:
        """Return a copy of the counters."""
        with self._lock:
            return dataclasses.replace(self._stats)
