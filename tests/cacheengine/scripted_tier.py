"""Tiers in memory whose operations a test can hold, fail and count."""

import threading
from collections.abc import Iterable, Sequence

from cacheengine.tiers.tier import Chunk, GetOutcome, LocalTier, PutOutcome, SharedTier, Tier
from tests.cacheengine.helpers import CHUNK_BYTES


class Scripted(Tier):
    """Keeps the contract; ``gets`` and ``puts`` are gates that a test may close."""

    def __init__(self, chunks: dict[bytes, bytes]) -> None:
        self.chunks = chunks
        self.gets = threading.Event()
        self.puts = threading.Event()
        self.gets.set()
        self.puts.set()
        self.get_outcome = GetOutcome.OK
        self.put_outcome = PutOutcome.STORED
        self.get_count = 0
        self.get_batches: list[int] = []
        self.put_batches: list[int] = []
        self.most_chunks = 0
        self._lock = threading.Lock()

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        self.put_batches.append(len(chunks))
        return [self._put(key, payload) for key, payload in chunks]

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        self.get_batches.append(len(chunks))
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
            # One look: in a shared tier others take chunks away at any time.
            held = self.chunks.get(key)
            if held is None:
                return GetOutcome.MISSING
            into[:] = held if self.get_outcome is GetOutcome.OK else b"\xff" * len(into)
            if self.get_outcome is GetOutcome.DAMAGED:
                self.chunks.pop(key, None)
            return self.get_outcome

    def delete(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self.chunks.pop(key, None)

    def close(self) -> None:
        self.gets.set()
        self.puts.set()


class ScriptedTier(Scripted, LocalTier):
    """A local tier of ``items`` chunks."""

    name = "disk"

    def __init__(self, items: int = 100, held: Iterable[bytes] = ()) -> None:
        super().__init__({})
        self.item_bytes = CHUNK_BYTES
        self.capacity_bytes = items * CHUNK_BYTES
        self.held_at_start = list(held)
        self.saves = threading.Event()
        self.saves.set()
        self.saved: list[bytes] | None = None

    def save(self, keys: Sequence[bytes], path: int = 0, *, is_final: bool) -> None:
        assert self.saves.wait(20)
        self.saved = [*keys] if is_final else self.saved

    def scan(self) -> list[bytes]:
        return self.held_at_start

    def close(self) -> None:
        super().close()
        self.saves.set()


class ScriptedRemote(Scripted, SharedTier):
    """A shared tier; ``server`` is what several of them have in common."""

    name = "remote"

    def __init__(self, server: dict[bytes, bytes] | None = None) -> None:
        super().__init__({} if server is None else server)
        self.finds = threading.Event()
        self.finds.set()
        self.answers = True
        self.questions: list[list[bytes]] = []

    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        self.questions.append(list(keys))
        assert self.finds.wait(20)
        return [key in self.chunks for key in keys] if self.answers else None

    def purge(self, keys: Sequence[bytes] | None) -> int | None:
        if not self.answers:
            return None
        removed = {*self.chunks} if keys is None else {*keys} & {*self.chunks}
        self.delete(removed)
        return len(removed)

    def close(self) -> None:
        super().close()
        self.finds.set()
