"""A disk tier in memory: what it keeps is real, its speed is the model's, its files are none.

A fleet writes hundreds of chunks a second. As files they would take more of
this machine than all the rest, and its own disk's speed would show.
"""

from collections.abc import Callable, Iterable, Sequence

from cacheengine.engine import IoThreads, JobRunner
from cacheengine.tiers import Chunk, GetOutcome, LocalTier, PutOutcome


class MemoryDisk(LocalTier):
    """Chunks in a dictionary."""

    name = "disk"
    batch_chunks = 4

    def __init__(self, *, chunks: int, chunk_bytes: int) -> None:
        self.capacity_bytes = chunks * chunk_bytes
        self.item_bytes = chunk_bytes
        self._chunks: dict[bytes, bytes] = {}

    def scan(self) -> list[bytes]:
        """Return no keys: there was no earlier life."""
        return []

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Keep copies."""
        for key, payload in chunks:
            self._chunks[key] = bytes(payload)
        return [PutOutcome.STORED] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Fill the buffers."""
        return [self._get(key, into) for key, into in chunks]

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        payload = self._chunks.get(key)
        if payload is None:
            return GetOutcome.MISSING
        into[:] = payload
        return GetOutcome.OK

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forget chunks."""
        for key in keys:
            self._chunks.pop(key, None)

    def close(self) -> None:
        """Nothing is held open."""


class InlineJobs:
    """Takes no job, so that who has one does it at once."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Leave the job to the caller."""
        return False

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """Nothing runs."""
        return True


def threads_for_memory(name: str, count: int) -> JobRunner:
    """Return the threads of an engine over a `MemoryDisk`: only reads, which are paced, wait."""
    return InlineJobs() if name.startswith("kv-put") else IoThreads(name, count)
