"""The disk tier beside one plain file: puts, gets and promotions, warm and cold."""

import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.engine_cases import MIB, Case, Contender, Step, in_turns, size
from bench.engine_index import key_of, layout
from bench.tiers import forget_pages
from bench.ttft import BenchError
from cacheengine.config import EngineConfig
from cacheengine.engine import CacheEngine
from cacheengine.pool import Pool

_GB: Final = 1024**3
_TIMEOUT_S: Final = 120.0


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
        self._engine = CacheEngine(
            EngineConfig(
                local_disk=(self._engine_root,),
                max_local_disk_size=capacity_chunks * (chunk_bytes + 4096) / _GB,
                put_queue_share=1.0,
            ),
            layout(chunk_bytes),
            Pool.over(memory, chunks, chunk_bytes),
        )
        self._engine.add_event_listener(self._on_event)
        self._awaited_puts = 0
        self._written = threading.Event()
        self._numbers = itertools.count()
        self._keys: list[bytes] = []
        self._plain_files = (self._plain_root / str(number) for number in itertools.count())
        self._plain_file = self._plain_root

    def _on_event(self) -> None:
        # On the thread that wrote, so that nobody else takes the processor to ask.
        if self._engine.stats().disk.puts >= self._awaited_puts:
            self._written.set()

    def new_keys(self) -> None:
        """Choose keys that were never used, and have the pool empty for them."""
        self.empty_pool()
        self._keys = [key_of(next(self._numbers)) for _ in range(self.chunks)]

    def put(self) -> None:
        """Store all chunks and return when they are on disk (nothing copies into the pool)."""
        before = self._engine.stats().disk.puts
        reservation = self._engine.prepare_store(self._keys)
        if reservation is None or len(reservation.keys) != self.chunks:
            raise BenchError("the pool was not empty before a put")
        self._awaited_puts = before + self.chunks
        self._written.clear()
        self._engine.complete_store(reservation.keys)
        if not self._written.wait(_TIMEOUT_S):
            raise BenchError(f"puts were not over after {_TIMEOUT_S:.0f} s; is the disk full?")

    def promote(self) -> None:
        """Bring all chunks from disk into the pool."""
        # Not pinned: pins may take only a part of the pool, and here it is filled.
        promotion = self._engine.promote(self._keys, pin_s=0.0)
        if not promotion.wait(_TIMEOUT_S) or promotion.promoted != self.chunks:
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
    """Measure the promotion of so many chunks at once, out of the page cache and cold.

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
