"""The disk tier compared with one plain file: puts, gets and promotions, warm and cold."""

import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.engine.cases import MIB, Case, Contender, Step, in_turns, size
from bench.engine.index import key_of, layout
from bench.replica.tiers import forget_pages, wait_until
from bench.ttft import BenchError
from cacheengine.engine.engine import CacheEngine
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.chunk_file import SEAL_BYTES
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import Chunk, PutOutcome

_TIMEOUT_S: Final = 120.0


class WatchedTier(DiskTier):
    """A disk tier that signals when N chunks were put: polling would take the processor."""

    def __init__(self, root: Path, chunk_bytes: int, capacity_chunks: int) -> None:
        capacity_bytes = capacity_chunks * (chunk_bytes + SEAL_BYTES)
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
    """An engine with a disk tier, and the same bytes in plain files, over the same memory.

    The tier holds ``capacity_chunks``. Every put has fresh keys, and nothing
    but what the tier evicts is removed, not even at the end: a file system
    that has just removed many files makes new ones slowly, and that would be
    measured instead.
    """

    def __init__(self, root: Path, chunks: int, chunk_bytes: int, *, capacity_chunks: int) -> None:
        self.chunks = chunks
        self.moved_bytes = chunks * chunk_bytes
        self._engine_root = root / "engine"
        self._plain_root = root / "plain"
        self._plain_root.mkdir(parents=True)
        memory = mmap.mmap(-1, self.moved_bytes)
        for start in range(0, self.moved_bytes, MIB):
            # Not zeros: a device that compresses must not be flattered.
            piece = random.Random(start).randbytes(min(MIB, self.moved_bytes - start))
            memory[start : start + len(piece)] = piece
        self._rows = [
            memoryview(memory)[start : start + chunk_bytes]
            for start in range(0, self.moved_bytes, chunk_bytes)
        ]
        self._tier = WatchedTier(self._engine_root, chunk_bytes, capacity_chunks)
        self._engine = CacheEngine(
            EngineConfig(put_queue_share=1.0),
            layout(chunk_bytes),
            Pool(memory, chunks, chunk_bytes),
            tier=self._tier,
        )
        self._numbers = itertools.count()
        self._keys: list[bytes] = []
        self._plain_files = (self._plain_root / str(number) for number in itertools.count())
        self._plain_file = self._plain_root

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

    def promote(self) -> None:
        """Bring all chunks from disk into the pool."""
        # Not pinned: pins may take only a part of the pool, and here it is filled.
        promotion = self._engine.promote(self._keys, pin_s=0.0)
        if not promotion.wait(_TIMEOUT_S) or promotion.counts.promoted != self.chunks:
            raise BenchError(f"not every chunk was read: {promotion}")

    def write_plain(self) -> None:
        """Write the same bytes into one new file."""
        self._plain_file = next(self._plain_files)
        fd = os.open(self._plain_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for row in self._rows:
            if os.write(fd, row) != len(row):
                raise BenchError("a plain write was cut short; is the disk full?")
        os.close(fd)

    def read_plain(self) -> None:
        """Read them back into the pool's memory."""
        fd = os.open(self._plain_file, os.O_RDONLY)
        for row in self._rows:
            if os.readv(fd, [row]) != len(row):
                raise BenchError("a plain read was cut short")
        os.close(fd)

    def empty_pool(self) -> None:
        """Leave the chunks on disk alone."""
        # The tier has them a moment before the engine knows.
        wait_until("no puts", lambda: self._engine.stats().put_queue_bytes == 0)
        self._engine.clear({"cpu"})

    def forget_ours(self) -> None:
        """Write our files to the device and drop them from the page cache."""
        forget_pages(self._engine_root)

    def forget_plain(self) -> None:
        """Do the same with the plain files."""
        forget_pages(self._plain_root)

    def remove_plain(self) -> None:
        """Remove the plain file, on the device too."""
        self.forget_plain()
        self._plain_file.unlink()
        os.sync()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def puts(root: Path, chunks: int, chunk_bytes: int, rounds: int) -> Iterator[Case]:
    """Measure puts into a tier that fills, and into one that is full and evicts as much.

    ``root`` need not exist yet. Leaves ``2 * (rounds + 1)`` times the bytes there.
    """
    of = f"{chunks} x {size(chunk_bytes)}"
    rig = DiskRig(root / "fills", chunks, chunk_bytes, capacity_chunks=3 * (rounds + 1) * chunks)
    try:
        for label, end in (("into the page cache", None), ("onto the device (sync)", os.sync)):
            yield _puts(rig, f"disk put, {of}, {label}", rounds, end)
    finally:
        rig.close()
    rig = DiskRig(root / "full", chunks, chunk_bytes, capacity_chunks=chunks)
    try:
        yield _puts(rig, f"disk put, {of}, into a full tier", rounds, None)
    finally:
        rig.close()


def _puts(rig: DiskRig, name: str, rounds: int, end: Step | None) -> Case:
    return in_turns(
        name,
        rounds,
        Contender(step=_in_order(rig.put, end), before=rig.new_keys, after=rig.forget_ours),
        Contender(step=_in_order(rig.write_plain, end), after=rig.remove_plain),
        moved_bytes=rig.moved_bytes,
    )


def gets(root: Path, name: str, chunks: int, chunk_bytes: int, rounds: int) -> Iterator[Case]:
    """Measure the promotion of N chunks at once, out of the page cache and cold.

    ``root`` need not exist yet.
    """
    rig = DiskRig(root, chunks, chunk_bytes, capacity_chunks=chunks)
    of = f"{chunks} x {size(chunk_bytes)}"
    try:
        rig.new_keys()
        rig.put()
        rig.write_plain()
        # Dirty pages could not be dropped, and being written while they are
        # read they would disturb.
        os.sync()
        for state in ("page cache", "cold"):
            is_cold = state == "cold"
            yield in_turns(
                f"{name}, {of}, {state}",
                rounds,
                Contender(
                    step=rig.promote,
                    before=_in_order(rig.empty_pool, rig.forget_ours if is_cold else None),
                ),
                Contender(step=rig.read_plain, before=rig.forget_plain if is_cold else None),
                moved_bytes=rig.moved_bytes,
            )
    finally:
        rig.close()


def _in_order(first: Step, second: Step | None) -> Step:
    if second is None:
        return first

    def both() -> None:
        first()
        second()

    return both
