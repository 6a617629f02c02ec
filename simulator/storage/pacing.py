"""Making real threads as slow as a modelled device."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from cacheengine.engine import CacheEngine
from cacheengine.tiers import Chunk, GetOutcome, LocalTier, PutOutcome


class Pacer:
    """A device that moves so many bytes a second, for all threads that use it together."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._late_s = 0.0

    def pass_through(self, num_bytes: int) -> None:
        """Return when so many bytes have come through after those asked for before."""
        with self._lock:
            now_s = self._clock()
            # What the last sleep was late is made up for now: on a busy machine the
            # device would else be slower than it should.
            begin_s = max(self._free_s, now_s - self._late_s)
            self._late_s = 0.0
            due_s = self._free_s = begin_s + num_bytes / self._bytes_per_s
        if due_s > now_s:
            self._sleep(due_s - now_s)
        with self._lock:
            self._late_s = max(0.0, self._clock() - due_s)


class PacedTier(LocalTier):
    """A local tier whose reads take as long as the modelled disk's. Writes do not wait."""

    name = "disk"

    def __init__(self, tier: LocalTier, pacer: Pacer) -> None:
        self._tier = tier
        self._pacer = pacer
        self.capacity_bytes = tier.capacity_bytes
        self.item_bytes = tier.item_bytes
        self.batch_chunks = tier.batch_chunks

    def scan(self) -> list[bytes]:
        """Return what is there from an earlier life."""
        return self._tier.scan()

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store chunks at once."""
        return self._tier.put_many(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read chunks, each in its turn and at the disk's speed."""
        outcomes = self._tier.get_many(chunks)
        self._pacer.pass_through(sum(len(into) for _, into in chunks))
        return outcomes

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks at once."""
        self._tier.delete(keys)

    def close(self) -> None:
        """Close the tier below."""
        self._tier.close()


class PacedEngine:
    """An engine whose bytes are sent or received at the speed of the modelled network.

    Made for `TransferServer`, which takes each chunk's bytes by `view` right before it
    sends them, and for `Fetch`, which takes their place so before it receives them;
    everything else is the engine's own.
    """

    def __init__(self, engine: CacheEngine, pacer: Pacer) -> None:
        self._engine = engine
        self._pacer = pacer

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes when it is their turn to be sent or received."""
        view = self._engine.view(slot)
        self._pacer.pass_through(len(view))
        return view

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)
