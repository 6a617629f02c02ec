"""A CPU pool that is kept, compared with one that ends with its process."""

import mmap
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.engine.cases import Case, Contender, in_turns, size
from bench.engine.index import key_of, layout
from bench.ttft import BenchError
from cacheengine.bulk import checksum
from cacheengine.engine.engine import CacheEngine
from cacheengine.kept_pool import PoolSeals, Seal, open_pool_file
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig

_TIMEOUT_S: Final = 120.0
_CALLS_A_ROUND: Final = 16


class WatchedSeals(PoolSeals):
    """Signals when N chunks were sealed: polling would take the processor."""

    awaited = 0
    all_sealed = threading.Event()

    def expect(self, chunks: int) -> None:
        """Begin to count."""
        self.awaited = chunks
        self.all_sealed.clear()

    def write(self, seal: Seal) -> None:
        """Seal and count."""
        super().write(seal)
        self.awaited -= 1
        if self.awaited == 0:
            self.all_sealed.set()


class KeptRig:
    """Engines over two pools of N chunks in memory: one is kept, the other is not."""

    def __init__(self, directory: Path, chunks: int, chunk_bytes: int) -> None:
        self._chunks, self._chunk_bytes = chunks, chunk_bytes
        self._next_key = 0
        self._index = chunks * chunk_bytes
        size_bytes = self._index + PoolSeals.size_bytes(chunks)
        file = open_pool_file(directory, size_bytes)
        self._memory = memoryview(mmap.mmap(file, size_bytes))
        os.close(file)
        self._memory[: self._index] = os.urandom(chunk_bytes) * chunks
        self.plain = self._engine(Pool.allocate(chunks, chunk_bytes), None)
        self.start()

    def _engine(self, pool: Pool, seals: PoolSeals | None) -> CacheEngine:
        return CacheEngine(EngineConfig(), layout(self._chunk_bytes), pool, seals=seals)

    def start(self) -> None:
        """Start an engine over the kept pool."""
        self.seals = WatchedSeals(
            self._memory[self._index :], layout(self._chunk_bytes).fingerprint(), self._chunks
        )
        pool = Pool(self._memory[: self._index], self._chunks, self._chunk_bytes)
        self.kept = self._engine(pool, self.seals)
        self.kept.start_keeping()

    def stop(self) -> None:
        """End it."""
        self.kept.close()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self.plain.close()

    def store(self, engine: CacheEngine, chunks: int) -> None:
        """Store as many chunks with fresh keys; their bytes lie in the slots."""
        keys = [key_of(self._next_key + number) for number in range(chunks)]
        self._next_key += chunks
        reservation = engine.prepare_store(keys)
        if reservation is None or len(reservation.keys) < chunks:
            raise BenchError("the pool has no room")
        engine.complete_store(reservation.keys)

    def store_and_seal(self) -> None:
        """Fill the kept pool; return when all of it is sealed."""
        self.seals.expect(self._chunks)
        self.store(self.kept, self._chunks)
        self._wait(self.seals.all_sealed)

    def restart(self) -> None:
        """Start over what the last engine has left; return when all of it can be used."""
        all_there = threading.Event()
        self.start()
        keys = [seal.key for seal in self.seals.read()]
        promotion = self.kept.promote(keys, pin_s=0.0)
        promotion.add_done_callback(all_there.set)
        self._wait(all_there)
        if promotion.counts.resident != self._chunks:
            raise BenchError(f"only {promotion.counts.resident} chunks were kept")

    def checksums(self) -> None:
        """Read all chunks once: the least that sealing or checking them takes."""
        for start in range(0, self._index, self._chunk_bytes):
            checksum(self._memory[start : start + self._chunk_bytes])

    def _wait(self, event: threading.Event) -> None:
        if not event.wait(_TIMEOUT_S):
            raise BenchError(f"the pool was not kept after {_TIMEOUT_S:.0f} s")


def kept(sizes: Sequence[tuple[int, int]], rounds: int) -> Iterator[Case]:
    """Measure sealing, what it costs a store, and a restart, with N chunks of each size.

    The limit is the checksum of the same bytes; for a store, the pool that is not kept. Ours may
    take twice as long.
    """
    for case in _cases(sizes, rounds):
        yield replace(case, bar=2 * statistics.median(case.limit))


def _cases(sizes: Sequence[tuple[int, int]], rounds: int) -> Iterator[Case]:
    for chunks, chunk_bytes in sizes:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="warmroute-bench-") as name:
            rig = KeptRig(Path(name), chunks, chunk_bytes)
            what = f"{chunks} chunks of {size(chunk_bytes)}"
            least, moved = Contender(step=rig.checksums), chunks * chunk_bytes
            ours = Contender(step=rig.store_and_seal)
            yield in_turns(f"kept: seal {what}", rounds, ours, least, moved_bytes=moved)
            ours, plain = (
                Contender(step=partial(_store_often, rig, is_kept)) for is_kept in (True, False)
            )
            label = f"kept: {_CALLS_A_ROUND} stores of 1 chunk of {size(chunk_bytes)}"
            yield in_turns(label, rounds, ours, plain, moved_bytes=0)
            rig.store_and_seal()
            ours = Contender(step=rig.restart, before=rig.stop)
            yield in_turns(f"kept: restart with {what}", rounds, ours, least, moved_bytes=moved)
            rig.close()


def _store_often(rig: KeptRig, is_kept: bool) -> None:
    for _ in range(_CALLS_A_ROUND):
        rig.store(rig.kept if is_kept else rig.plain, 1)
