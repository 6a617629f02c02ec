"""The disk tier compared with vLLM's own tiering, and with plain O_DIRECT, by size of a chunk."""

import importlib
import itertools
import mmap
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from bench.engine.cases import MIB, Case, Contender, in_turns, size
from bench.engine.index import key_of, layout
from bench.replica.tiers import wait_until
from bench.ttft import BenchError
from cacheengine.engine.engine import CacheEngine
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.slot_file import slot_bytes
from cacheengine.tiers.tier import Chunk, PutOutcome

_TIMEOUT_S: Final = 120.0
_DIRECT_THREADS: Final = 4
_MOST_CPU: Final = 1.5
"""Processor time of a chunk, compared with plain O_DIRECT."""


class Disk(Protocol):
    """Something that writes chunks to files and reads them back, always the same number."""

    @property
    def memory(self) -> memoryview:
        """The chunks, one after the other."""

    def new_keys(self) -> None:
        """Choose keys that were never used."""

    def put(self) -> None:
        """Write all chunks."""

    def get(self) -> None:
        """Read them from the device."""

    def close(self) -> None:
        """End."""


class WatchedTier(DiskTier):
    """A disk tier that signals when N chunks were put: polling would take the processor."""

    def __init__(self, root: Path, chunk_bytes: int, capacity_chunks: int) -> None:
        capacity_bytes = capacity_chunks * slot_bytes(chunk_bytes)
        super().__init__([root], layout(chunk_bytes).fingerprint(), chunk_bytes, capacity_bytes)
        # Guards _awaited: the puts come from several threads.
        self._counting = threading.Lock()
        self._awaited = 0
        self._all_put = threading.Event()

    def expect(self, chunks: int) -> None:
        """Begin to count."""
        self._awaited = chunks
        self._all_put.clear()

    def wait(self) -> None:
        """Return when as many as expected were put."""
        if not self._all_put.wait(_TIMEOUT_S):
            raise BenchError(f"puts were not over after {_TIMEOUT_S:.0f} s; is the disk full?")

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Put and count."""
        outcomes = super().put_many(chunks)
        with self._counting:
            self._awaited -= outcomes.count(PutOutcome.STORED)
            if self._awaited <= 0:
                self._all_put.set()
        return outcomes


class DiskRig:
    """An engine with a disk tier that holds ``capacity_chunks``.

    Every put has fresh keys, and nothing but what the tier evicts is removed, not even at the end:
    a file system that has just removed many files makes new ones slowly, and that would be
    measured instead.
    """

    def __init__(
        self, root: Path, chunk_bytes: int, memory: memoryview, *, capacity_chunks: int
    ) -> None:
        self.chunks = chunks = len(memory) // chunk_bytes
        self.moved_bytes = len(memory)
        self._tier = WatchedTier(root, chunk_bytes, capacity_chunks)
        self._engine = CacheEngine(
            EngineConfig(put_queue_share=1.0),
            layout(chunk_bytes),
            Pool(memory, chunks, chunk_bytes),
            tier=self._tier,
        )
        self._numbers = itertools.count()
        self._keys: list[bytes] = []

    def new_keys(self) -> None:
        """Choose keys that were never used, and have the pool empty for them."""
        self.empty_pool()
        self._keys = [key_of(next(self._numbers)) for _ in range(self.chunks)]

    def put(self) -> None:
        """Store all chunks and return when they are on disk (nothing copies into the pool)."""
        reservation = self._engine.prepare_store(self._keys)
        if reservation is None or len(reservation.keys) != self.chunks:
            raise BenchError("the pool was not empty before a put")
        self._tier.expect(self.chunks)
        self._engine.complete_store(reservation.keys)
        self._tier.wait()

    def get(self) -> None:
        """Bring all chunks from disk into the pool."""
        # Not pinned: pins may take only a part of the pool, and here it is filled.
        promotion = self._engine.promote(self._keys, pin_s=0.0)
        if not promotion.wait(_TIMEOUT_S) or promotion.counts.promoted != self.chunks:
            raise BenchError(f"not every chunk was read: {promotion}")

    def empty_pool(self) -> None:
        """Leave the chunks on disk alone."""
        # The tier has them a moment before the engine knows.
        wait_until("no puts", lambda: self._engine.stats().put_queue_bytes == 0)
        self._engine.clear({"cpu"})

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class DirectFiles:
    """A file for each chunk, opened with O_DIRECT, in one call; nothing else."""

    def __init__(self, root: Path, chunk_bytes: int, memory: memoryview) -> None:
        root.mkdir(parents=True)
        self._root = root
        self.memory = memory
        starts = range(0, len(memory), chunk_bytes)
        self._rows = [memory[start : start + chunk_bytes] for start in starts]
        self._round = 0

    def new_keys(self) -> None:
        """Choose names that were never used."""
        self._round += 1

    def put(self) -> None:
        """Write all chunks by some threads."""
        self._by_threads(os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwritev)

    def get(self) -> None:
        """Read them."""
        self._by_threads(os.O_RDONLY, os.preadv)

    def _by_threads(
        self, flags: int, call: Callable[[int, Sequence[memoryview], int], int]
    ) -> None:
        moved = [0] * _DIRECT_THREADS

        def move(first: int) -> None:
            for place in range(first, len(self._rows), _DIRECT_THREADS):
                fd = os.open(f"{self._root}/{self._round}.{place}", flags | os.O_DIRECT, 0o600)
                moved[first] += call(fd, [self._rows[place]], 0)
                os.close(fd)

        threads = [threading.Thread(target=move, args=[first]) for first in range(_DIRECT_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sum(moved) != len(self.memory):
            raise BenchError("plain files were cut short; is the disk full?")

    def close(self) -> None:
        """Release the memory, so that its owner can unmap it."""
        for row in self._rows:
            row.release()


def random_memory(size_bytes: int) -> memoryview:
    """Return memory that is not zeros: a device may compress."""
    memory = mmap.mmap(-1, size_bytes)
    for start in range(0, size_bytes, MIB):
        piece = random.Random(start).randbytes(min(MIB, size_bytes - start))
        memory[start : start + len(piece)] = piece
    return memoryview(memory)


def disk(root: Path, chunks: int, chunk_bytes: int, rounds: int) -> Iterator[Case]:
    """Measure puts and cold gets of N chunks at once; leaves the bytes of every round there.

    ``root`` need not exist yet. vLLM's tiering is left out, saying so, where it is not installed.

    All use the same memory. A device moves more bytes at once where pages follow one another in
    physical memory. With memory of their own, the rival that allocated last was the fastest.
    """
    of = f"{chunks} x {size(chunk_bytes)}"
    enough = (2 * rounds + 3) * chunks
    vllm = _vllm(root / "vllm", chunks, chunk_bytes)
    memory = random_memory(chunks * chunk_bytes) if vllm is None else vllm.memory
    rig = DiskRig(root / "ours", chunk_bytes, memory, capacity_chunks=enough)
    full = DiskRig(root / "full", chunk_bytes, memory, capacity_chunks=chunks)
    plain = DirectFiles(root / "plain", chunk_bytes, memory)
    try:
        if vllm is not None:
            yield from _compared(rig, vllm, f"{of}, vLLM's tiering", rounds, least_ratio=1.0)
            full.new_keys()
            full.put()
            name = f"disk put, {of}, into a full tier, vLLM's tiering"
            yield _turns(full, vllm, name, rounds, gets=False, least_ratio=1.0)
        yield from _compared(rig, plain, f"{of}, plain O_DIRECT", rounds, most_cpu=_MOST_CPU)
    finally:
        for each in (rig, full, plain, vllm):
            if each is not None:
                each.close()


def _vllm(root: Path, chunks: int, chunk_bytes: int) -> Disk | None:
    try:
        made: Disk = importlib.import_module("bench.engine.vllm_tier").VllmTier(
            root, chunks, chunk_bytes
        )
    except ImportError as error:
        print(f"vLLM's tiering is left out: {error}", file=sys.stderr)
        return None
    return made


def _compared(rig: DiskRig, rival: Disk, name: str, rounds: int, **bars: float) -> Iterator[Case]:
    yield _turns(rig, rival, f"disk put, {name}", rounds, gets=False, **bars)
    yield _turns(rig, rival, f"disk get, {name}", rounds, gets=True, **bars)


def _turns(rig: DiskRig, rival: Disk, name: str, rounds: int, *, gets: bool, **bars: float) -> Case:
    if gets:
        ours = Contender(step=rig.get, before=rig.empty_pool)
        limit = Contender(step=rival.get)
    else:
        ours = Contender(step=rig.put, before=rig.new_keys)
        limit = Contender(step=rival.put, before=rival.new_keys)
    return in_turns(name, rounds, ours, limit, moved_bytes=rig.moved_bytes, **bars)
