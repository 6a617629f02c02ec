"""What transfers count. Every counter is defined on its line."""

import dataclasses
import threading
from dataclasses import dataclass


@dataclass(slots=True)
class TransferStats:
    """Counts since the replica's start; bytes are payload bytes."""

    sent_chunks: int = 0
    """Chunks sent to other replicas."""
    sent_bytes: int = 0
    """Bytes of those."""
    send_missing: int = 0
    """Chunks asked for by another replica that were not there, or not readable."""
    send_refused: int = 0
    """Connections refused: another layout or version, too many at once."""
    send_failures: int = 0
    """Connections that broke, or on which the other side spoke nonsense."""
    received_chunks: int = 0
    """Chunks fetched whole from other replicas."""
    received_bytes: int = 0
    """Bytes of those."""
    receive_corrupt: int = 0
    """Chunks whose bytes did not fit their checksum; none of it is kept."""
    receive_failures: int = 0
    """Connections to other replicas that were refused, broke or timed out."""
    moves: int = 0
    """Moves into this replica that were begun."""
    moves_failed: int = 0
    """Of those: not all arrived, or the source kept what was to leave it."""


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
