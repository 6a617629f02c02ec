"""The disk tier: one file per chunk, spread over one or several paths.

``<path>/<fingerprint>/<first 2 hex digits>/<key in hex>.kv``; `chunk_file` says
what is in it. A file is written under another name and renamed when whole.
There is no fsync: after a power failure a file may be damaged, which reading
finds out.

A chunk's key says which path it goes to, and which are asked next when that
one cannot take it. A path that fails or is full so costs its own chunks and no
others, and paths may be added and removed from one start to the next.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from cacheengine.tiers.base import Chunk, GetOutcome, LocalTier, PutOutcome
from cacheengine.tiers.disk.chunk_file import ChunkFile
from cacheengine.tiers.disk.directories import OtherLayouts
from cacheengine.tiers.disk.disk_path import DiskPath, Found
from cacheengine.tiers.disk.disk_space import DiskSpace
from cacheengine.tiers.disk.linux_io import why_not_direct

logger = logging.getLogger("vllm.warmroute")

_LOCK_WAIT_S: Final = 15.0


class DiskTier(LocalTier):
    """Files under ``roots``, in directories named by the layout's fingerprint.

    Takes an exclusive lock on those directories for its life: two owners would
    remove each other's half-written files and break the size limit. Raises
    `directories.DirectoryInUseError` when another process keeps one (for
    ``lock_wait_s``, so that a predecessor may finish dying), and OSError when
    one cannot be made or written.

    ``capacity_bytes`` is the limit of all paths together. With ``direct``,
    files that are not in the page cache are read past it where that works, with
    ``direct_writes`` all are written so.
    """

    name = "disk"
    batch_chunks = 4

    def __init__(
        self,
        roots: Sequence[Path],
        fingerprint: str,
        payload_bytes: int,
        capacity_bytes: int,
        *,
        direct: bool = True,
        direct_writes: bool = False,
        lock_wait_s: float = _LOCK_WAIT_S,
    ) -> None:
        file = ChunkFile(fingerprint, payload_bytes)
        self.capacity_bytes = capacity_bytes
        self.item_bytes = file.file_bytes
        self._space = DiskSpace(capacity_bytes, file.file_bytes)
        self._paths: list[DiskPath] = []
        try:
            for root in dict.fromkeys(each.resolve() for each in roots):
                path = DiskPath(root, fingerprint, file, self._space, lock_wait_s=lock_wait_s)
                self._paths.append(path)
                path.reads_direct = direct and _can_be_direct(path.directory, file, reads=True)
                path.writes_direct = direct_writes and _can_be_direct(
                    path.directory, file, reads=False
                )
        except OSError:
            self.close()
            raise
        self._seeds = [
            xxhash.xxh3_64_intdigest(str(path.directory.parent).encode()) for path in self._paths
        ]

    @property
    def used_bytes(self) -> int:
        """What our files take, those included that could not be removed; never too little."""
        return self._space.used_bytes

    @property
    def directories(self) -> list[Path]:
        """Where the files are, one directory for each path."""
        return [path.directory for path in self._paths]

    def path(self, key: bytes) -> Path:
        """Return where a chunk's file goes first."""
        return self._by_preference(key)[0].file(key)

    def _by_preference(self, key: bytes) -> Sequence[DiskPath]:
        """Order the paths for a key: each gets its share, and keeps it when others come or go."""
        if len(self._paths) == 1:
            return self._paths
        weights = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        order = sorted(range(len(weights)), key=weights.__getitem__)
        return [self._paths[position] for position in order]

    def scan(self) -> list[bytes]:
        """Return the keys of whole files, least recently used first; remove the others.

        Also makes the chunks of other layouts fit into what this one leaves
        of the capacity, unless another process owns them.
        """
        found: dict[bytes, Found] = {}
        for path in self._paths:
            for file in path.scan():
                first = found.setdefault(file.key, file)
                if first is not file:
                    # Written elsewhere while this path was failing.
                    found[file.key] = max(first, file, key=_time_of_use)
                    older = min(first, file, key=_time_of_use)
                    self._space.remove_leftover(older.path, self.item_bytes)
        others = OtherLayouts(self.directories)
        self._space.start_with(((file.path, file.key) for file in found.values()), others)
        return [file.key for file in sorted(found.values(), key=_time_of_use)]

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Write each file under a temporary name, then rename it."""
        return [self._put(key, payload) for key, payload in chunks]

    def _put(self, key: bytes, payload: memoryview) -> PutOutcome:
        outcome = PutOutcome.FAILED
        paths = self._by_preference(key)
        for path in paths:
            ended = path.put(key, payload)
            if ended is PutOutcome.STORED:
                for other in paths:
                    if other is not path:
                        other.remove(key)
                return ended
            if ended is PutOutcome.NO_SPACE:
                outcome = ended
        return outcome

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read files into the buffers and compare each with its seal."""
        return [self._get(key, into) for key, into in chunks]

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        outcome = GetOutcome.MISSING
        for path in self._by_preference(key):
            ended = path.get(key, into)
            if ended is GetOutcome.OK:
                return ended
            if outcome is GetOutcome.MISSING:
                outcome = ended
        return outcome

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove files; one that cannot be removed stays counted and is tried again."""
        for key in keys:
            for path in self._paths:
                path.remove(key)

    def close(self) -> None:
        """Give the directories free for another process."""
        self._space.remove_spares()
        for path in self._paths:
            path.close()


def _time_of_use(file: Found) -> tuple[int, bytes]:
    return file.used_ns, file.key


def _can_be_direct(directory: Path, file: ChunkFile, *, reads: bool) -> bool:
    kind = "reads" if reads else "writes"
    if not file.can_be_direct:
        logger.info("disk tier: chunks are no whole pages, so all %s go by the page cache", kind)
        return False
    reason = why_not_direct(directory, reads=reads)
    if reason is not None:
        logger.info("disk tier: all %s of %s go by the page cache: %s", kind, directory, reason)
    return reason is None
