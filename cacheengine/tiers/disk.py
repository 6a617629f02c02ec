"""The disk tier: chunks in slots of few large files, on one or several paths.

`disk_path` describes one path, `slot_file` a chunk in its slot. There is no fsync: after a power
failure a chunk may be damaged, which reading it detects.

The key decides on which path a chunk is stored, and which paths are tried next when that one
fails. So a failing or full path costs only its own chunks, and paths may be added and removed
from one start to the next. A path is not touched for chunks that another one holds: one that
hangs costs only its own chunks, too.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import xxhash

from cacheengine.tiers.disk_path import DiskPath
from cacheengine.tiers.layout_directory import DirectoryInUseError
from cacheengine.tiers.other_layouts import DiskBudget
from cacheengine.tiers.slot_file import ChunkSeal
from cacheengine.tiers.tier import Chunk, GetOutcome, LocalTier, PutOutcome

T = TypeVar("T")

logger = logging.getLogger("vllm.warmroute")

_LOCK_WAIT_S: Final = 15.0
_BATCH_CHUNKS: Final = 32
_BATCH_BYTES: Final = 4 * 1024 * 1024
"""The most that one call reads: requests wait for a disk only as long as its reads end."""


class DiskTier(LocalTier):
    """Files below ``roots``, in directories named by the layout's fingerprint.

    Locks these directories while it lives: two owners would write to the same slots and exceed the
    size limit. Raises `layout_directory.DirectoryInUseError` when another process holds a lock for
    ``lock_wait_s`` (long enough for a predecessor to exit), and OSError when none of the
    directories can be created or written. With a warning it does without some of them.

    ``capacity_bytes`` is the limit of all paths together. With ``direct``, files are read and
    written past the page cache where that works.
    """

    name = "disk"

    def __init__(
        self,
        roots: Sequence[Path],
        fingerprint: str,
        payload_bytes: int,
        capacity_bytes: int,
        *,
        direct: bool = True,
        lock_wait_s: float = _LOCK_WAIT_S,
    ) -> None:
        seal = ChunkSeal(fingerprint, payload_bytes)
        self.capacity_bytes = capacity_bytes
        self.item_bytes = seal.slot_bytes
        self.batch_chunks = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // payload_bytes))
        self._opened_ns = time.time_ns()
        self._paths: list[DiskPath] = []
        budget = DiskBudget(capacity_bytes)
        failed: dict[Path, OSError] = {}
        for root in dict.fromkeys(each.resolve() for each in roots):
            try:
                path = DiskPath(
                    root / fingerprint, seal, budget, direct=direct, lock_wait_s=lock_wait_s
                )
            except DirectoryInUseError:
                self.close()
                raise
            except OSError as error:
                failed[root] = error
            else:
                self._paths.append(path)
        for root, problem in failed.items():
            if not self._paths:
                raise problem
            logger.warning(
                "disk tier: cannot use local_disk %s, and does without it until the next start: %s",
                *(root, problem),
            )
        self._seeds = [
            xxhash.xxh3_64_intdigest(str(directory.parent).encode())
            for directory in self.directories
        ]

    @property
    def used_bytes(self) -> int:
        """Bytes that our files take, free slots included; never too few."""
        return sum(path.used_bytes for path in self._paths)

    @property
    def paths(self) -> int:
        return len(self._paths)

    def path_of(self, key: bytes) -> int:
        return self._order(key)[0]

    @property
    def directories(self) -> list[Path]:
        """The directory of each path."""
        return [path.directory for path in self._paths]

    def _order(self, key: bytes) -> Sequence[int]:
        """Order the paths for a key by rendezvous hashing.

        Each path gets an equal share of keys, and keeps its keys when paths come and go.
        """
        if len(self._paths) == 1:
            return (0,)
        weights = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return sorted(range(len(weights)), key=weights.__getitem__)

    def scan(self) -> list[bytes]:
        """Return the keys of the chunks that are there, the next to leave first.

        Then removes the files of other layouts that do not fit into the capacity that is left,
        the oldest first, unless another process owns them.
        """
        places: dict[bytes, tuple[int, DiskPath]] = {}
        for path in self._paths:
            for key, place in path.scan(self._opened_ns).items():
                last = max(places.get(key, (-1, path)), (place, path), key=lambda each: each[0])
                # Written to another path while the first one failed.
                self._remove([key], but=self._paths.index(last[1]))
                places[key] = last
        for path in self._paths:
            path.others.collect(path.directory)
        for path in self._paths:
            path.others.make_room(0)
        return sorted(places, key=lambda key: places[key][0])

    def save(self, keys: Sequence[bytes], path: int = 0, *, is_final: bool) -> None:
        """Write a path's index for the next `scan`."""
        # Numbers that grow with the order, alike on all paths, and before all times of what this
        # engine writes.
        self._paths[path].save(keys, self._opened_ns - len(keys), is_final=is_final)

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Write each chunk into a free slot of the first path that has one."""
        outcomes = [PutOutcome.FAILED] * len(chunks)
        orders = [self._order(key) for key, _ in chunks]
        # Twice: the slot that was freed for a chunk may have gone to one of another thread, and
        # the slot of that one is free on a path that had none before.
        count = len(self._paths)
        for turn in range(2 * count if count > 1 else 1):
            again = PutOutcome.FAILED if turn < count else PutOutcome.NO_SPACE
            left = (at for at, each in enumerate(outcomes) if each in (again, PutOutcome.NO_SPACE))
            paths = {at: orders[at][turn % count] for at in left}
            for at, outcome in self._on_paths(DiskPath.put_many, chunks, paths):
                if outcome is not PutOutcome.FAILED:
                    outcomes[at] = outcome
                if outcome is PutOutcome.STORED:
                    self._remove([chunks[at][0]], but=paths[at])
        return outcomes

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read chunks into the buffers and compare each with its seal."""
        paths = {at: self._holder(key) for at, (key, _) in enumerate(chunks)}
        ended = dict(self._on_paths(DiskPath.get_many, chunks, paths))
        return [ended[at] for at in range(len(chunks))]

    def _on_paths(
        self,
        call: Callable[[DiskPath, Sequence[Chunk]], Sequence[T]],
        chunks: Sequence[Chunk],
        paths: Mapping[int, int],
    ) -> Iterator[tuple[int, T]]:
        """Do a call on each path with the chunks whose path it is; return how each chunk ended."""
        for path in {*paths.values()}:
            part = [at for at, its in paths.items() if its == path]
            yield from zip(part, call(self._paths[path], [chunks[at] for at in part]), strict=True)

    def _holder(self, key: bytes) -> int:
        """Return the path that holds a chunk. Makes no system call."""
        order = self._order(key)
        return next((each for each in order if key in self._paths[each]), order[0])

    def delete(self, keys: Iterable[bytes]) -> None:
        """Free the slots of chunks."""
        self._remove([*keys])

    def _remove(self, keys: Sequence[bytes], *, but: int | None = None) -> None:
        for position, path in enumerate(self._paths):
            # A path that holds none of them is not touched: it may hang.
            held = [key for key in keys if key in path] if position != but else []
            if held:
                path.remove(held)

    def close(self) -> None:
        """Give free slots back to the file systems, and unlock the directories.

        A read or write that still hangs keeps its file open. What it writes later may damage
        another chunk, which reading that one detects.
        """
        for path in self._paths:
            path.close()
