"""A tier in memory whose operations a test can hold, fail and count."""

import threading
from collections.abc import Iterable, Sequence

from cacheengine.tiers.base import Chunk, GetOutcome, LocalTier, PutOutcome
from tests.cacheengine.building import CHUNK_BYTES


class ScriptedTier(LocalTier):
    """Keeps the contract; ``gets`` and ``puts`` are gates that a test may close."""

    name = "disk"

    def __init__(self, items: int = 100, held: Iterable[bytes] = ()) -> None:
        self.item_bytes = CHUNK_BYTES
        self.capacity_bytes = items * CHUNK_BYTES
        self.chunks: dict[bytes, bytes] = {}
        self.held_at_start = list(held)
        self.gets = threading.Event()
        self.puts = threading.Event()
        self.gets.set()
        self.puts.set()
        self.get_outcome = GetOutcome.OK
        self.put_outcome = PutOutcome.STORED
        self.get_count = 0
        self.most_chunks = 0
        self._lock = threading.Lock()

    def scan(self) -> list[bytes]:
        return self.held_at_start

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        return [self._put(key, payload) for key, payload in chunks]

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        return [self._get(key, into) for key, into in chunks]

    def _put(self, key: bytes, payload: memoryview) -> PutOutcome:
        assert self.puts.wait(20)
        with self._lock:
            if self.put_outcome is PutOutcome.STORED:
                self.chunks[key] = bytes(payload)
                self.most_chunks = max(self.most_chunks, len(self.chunks))
            return self.put_outcome

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        with self._lock:
            self.get_count += 1
        assert self.gets.wait(20)
        with self._lock:
            if key not in self.chunks:
                return GetOutcome.MISSING
            if self.get_outcome is GetOutcome.OK:
                into[:] = self.chunks[key]
            else:
                into[:] = b"\xff" * len(into)
            if self.get_outcome is GetOutcome.DAMAGED:
                del self.chunks[key]
            return self.get_outcome

    def delete(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self.chunks.pop(key, None)

    def close(self) -> None:
        self.gets.set()
        self.puts.set()
