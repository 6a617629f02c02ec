"""The disk tier: one file per chunk, on one or several paths.

The chunk files of a path are below ``<path>/<fingerprint>`` (`layout_directory`); `chunk_file`
describes their content. A file is written under another name and renamed when it is complete. There
is no fsync: after a power failure a file may be damaged, which reading it detects.

The key decides on which path a chunk is stored, and which paths are tried next when that one
fails. So a failing or full path costs only its own chunks, and paths may be added and removed
from one start to the next. A path is not touched for chunks that another one holds: one that
hangs costs only its own chunks, too.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from cacheengine.tiers.chunk_file import ChunkFile, why_not_direct
from cacheengine.tiers.disk_space import (
    DirectoryInUseError,
    DiskSpace,
    OtherLayouts,
    is_unmounted,
    lock_directory,
    make_private,
)
from cacheengine.tiers.layout_directory import DIRECTORY_MODE, FILE_MODE, LayoutDirectory
from cacheengine.tiers.tier import Chunk, GetOutcome, LocalTier, PutOutcome

logger = logging.getLogger("vllm.warmroute")

_LOCK_WAIT_S: Final = 15.0
_BATCH_CHUNKS: Final = 32
_BATCH_BYTES: Final = 4 * 1024 * 1024
"""The most that one call reads: requests wait for a disk only as long as its reads end."""
_SPARE_BATCHES: Final = 16
"""Chunks that several threads evict at once, each a batch, leave files for what they write."""
_NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskTier(LocalTier):
    """Files below ``roots``, in directories named by the layout's fingerprint.

    Locks these directories while it lives: two owners would remove each other's unfinished files
    and exceed the size limit. Raises `disk_space.DirectoryInUseError` when another process holds
    a lock for ``lock_wait_s`` (long enough for a predecessor to exit), and OSError when none of
    the directories can be created or written. With a warning it does without some of them.

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
        file = ChunkFile(fingerprint, payload_bytes)
        self.capacity_bytes = capacity_bytes
        self.item_bytes = file.file_bytes
        self.batch_chunks = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // payload_bytes))
        self._opened_ns = time.time_ns()
        self._spaces: list[DiskSpace] = []
        self._paths: list[DiskPath] = []
        failed: dict[Path, OSError] = {}
        for root in dict.fromkeys(each.resolve() for each in roots):
            try:
                space = DiskSpace(
                    capacity_bytes,
                    file.file_bytes,
                    self._spaces,
                    most_spares=_SPARE_BATCHES * self.batch_chunks,
                )
                path = DiskPath(
                    root, fingerprint, file, space, direct=direct, lock_wait_s=lock_wait_s
                )
            except DirectoryInUseError:
                self.close()
                raise
            except OSError as error:
                failed[root] = error
                continue
            self._paths.append(path)
            self._spaces.append(space)
        for root, problem in failed.items():
            if not self._paths:
                raise problem
            logger.warning(
                "disk tier: cannot use local_disk %s, and does without it until the next start: %s",
                *(root, problem),
            )
        self._seeds = [
            xxhash.xxh3_64_intdigest(str(path.directory.parent).encode()) for path in self._paths
        ]

    @property
    def used_bytes(self) -> int:
        """Bytes that our files take, files that could not be removed included; never too few."""
        return sum(space.used_bytes for space in self._spaces)

    @property
    def paths(self) -> int:
        return len(self._paths)

    def path_of(self, key: bytes) -> int:
        return self._order(key)[0]

    @property
    def directories(self) -> list[Path]:
        """The directory of each path."""
        return [path.directory for path in self._paths]

    def path(self, key: bytes) -> Path:
        """Return the file of a chunk on the path that is tried first."""
        return Path(self._paths[self.path_of(key)].file(key))

    def _order(self, key: bytes) -> Sequence[int]:
        """Order the paths for a key by rendezvous hashing.

        Each path gets an equal share of keys, and keeps its keys when paths come and go.
        """
        if len(self._paths) == 1:
            return (0,)
        weights = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return sorted(range(len(weights)), key=weights.__getitem__)

    def scan(self) -> list[bytes]:
        """Return the keys of complete files, the next to leave first; remove the others.

        Then removes the oldest chunks of other layouts that do not fit into the capacity that is
        left, unless another process owns them.
        """
        held: dict[DiskPath, dict[bytes, int]] = {}
        for path in self._paths:
            found = path.scan()
            for other, theirs in held.items():
                for key in found.keys() & theirs.keys():
                    # Written to another path while the first one failed.
                    older, chunks = (path, found) if found[key] <= theirs[key] else (other, theirs)
                    del chunks[key]
                    older.space.remove_leftover(older.file(key), self.item_bytes)
            held[path] = found
        for path, chunks in held.items():
            path.space.start_with(chunks, OtherLayouts([path.directory], self.capacity_bytes))
        for space in self._spaces:
            space.shrink_others()
        used_ns: dict[bytes, int] = {}
        for found in held.values():
            used_ns.update(found)
        return sorted(used_ns, key=used_ns.__getitem__)

    def save(self, keys: Sequence[bytes], path: int = 0, *, is_final: bool) -> None:
        """Write a path's index for the next `scan`."""
        if is_final:
            self._spaces[path].remove_spares()
        # Numbers that grow with the order, alike on all paths, and before all times of what this
        # engine writes.
        first_ns = self._opened_ns - len(keys)
        held, is_sound = self._spaces[path].held()
        chunks = [(first_ns + place, key) for place, key in enumerate(keys) if key in held]
        is_exact = is_final and is_sound and len(chunks) == len(held)
        self._paths[path].save(chunks, is_exact=is_exact)

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Write each file under a temporary name, then rename it."""
        return [self._put(key, payload) for key, payload in chunks]

    def _put(self, key: bytes, payload: memoryview) -> PutOutcome:
        outcome = PutOutcome.FAILED
        for position in self._order(key):
            ended = self._paths[position].put(key, payload)
            if ended is PutOutcome.STORED:
                for other in self._paths[:position] + self._paths[position + 1 :]:
                    other.remove(key)
                return ended
            if ended is PutOutcome.NO_SPACE:
                outcome = ended
        return outcome

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read files into the buffers and compare each with its seal."""
        return [self._get(key, into) for key, into in chunks]

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        first, *rest = self._order(key)
        for position in rest:
            if not self._paths[first].may_hold(key) and self._paths[position].may_hold(key):
                return self._paths[position].get(key, into)
        return self._paths[first].get(key, into)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove files. One that cannot be removed stays counted and is tried again later."""
        for key in keys:
            for path in self._paths:
                path.remove(key)

    def close(self) -> None:
        """Remove spare files and unlock the directories."""
        for path in self._paths:
            path.space.remove_spares()
            path.close()


def _can_be_direct(directory: Path, file: ChunkFile) -> bool:
    reason: str | None = "the chunk size is not a multiple of 4096 bytes"
    if file.can_be_direct:
        reason = why_not_direct(directory)
    if reason is not None:
        logger.info("disk tier: %s is used by the page cache: %s", directory, reason)
    return reason is None


class DiskPath:
    """Chunk files in ``<root>/<fingerprint>``. The directory is locked until `close`."""

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        file: ChunkFile,
        space: DiskSpace,
        *,
        direct: bool,
        lock_wait_s: float,
    ) -> None:
        self.directory = root / fingerprint
        self._files = LayoutDirectory(self.directory)
        self._file = file
        self.space = space
        self._failing: set[str] = set()
        # Guards _lock_fd: two puts may find the directory removed at the same time.
        self._relocking = threading.Lock()
        self._is_closed = False
        make_private(self.directory)
        self._lock_fd: int | None = lock_directory(self.directory, lock_wait_s)
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW
        if direct and _can_be_direct(self.directory, file):
            self._flags |= os.O_DIRECT

    def file(self, key: bytes) -> str:
        """Return the path of a chunk's file, whether it exists or not."""
        return self._files.file(key)

    def may_hold(self, key: bytes) -> bool:
        """Whether there may be a file of a chunk here. Makes no system call."""
        return self.space.may_hold(self._files.file(key), key)

    def scan(self) -> dict[bytes, int]:
        """Return the complete files and their times of use; remove the others.

        A directory that cannot be listed stays as it is, with a warning.
        """
        return self._files.stored(
            self._file.file_bytes,
            self.space.remove_leftover,
            lambda error: self._report("list", error),
        )

    def save(self, chunks: Sequence[tuple[int, bytes]], *, is_exact: bool) -> None:
        """Write the index, unless the directory was removed or unmounted."""
        with self._relocking:
            fd = self._lock_fd
            if fd is None or not os.fstat(fd).st_nlink or is_unmounted(self.directory, fd):
                return
        try:
            self._files.save(chunks, is_exact=is_exact)
        except OSError as error:
            self._report("write", error)

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Write a file under a temporary name, then rename it."""
        path = self._files.file(key)
        draft = self.space.take(path)
        if draft is None:
            return PutOutcome.NO_SPACE
        outcome = PutOutcome.FAILED
        exists = draft.is_spare
        try:
            fd = self._open_new(draft.path)
            exists = True
            try:
                self._file.write(fd, key, payload, is_new=not draft.is_spare)
            finally:
                os.close(fd)  # may report what writing did not
            self._rename(draft.path, path)
            outcome = PutOutcome.STORED
        except OSError as error:
            self._report("write", error)
            if error.errno in _NO_SPACE_ERRORS:
                outcome = PutOutcome.NO_SPACE
        finally:
            if outcome is PutOutcome.STORED:
                self.space.stored(path, key)
            else:
                self.space.failed(path, draft, exists=exists)
        if outcome is PutOutcome.STORED:
            self._report("write", None)
        return outcome

    def _open_new(self, path: str) -> int:
        flags = self._flags | os.O_WRONLY | os.O_CREAT
        if self._lock_fd is None:
            self._restore_directory()
        try:
            return os.open(path, flags, FILE_MODE)
        except FileNotFoundError:
            self._make_parent(path)
            return os.open(path, flags, FILE_MODE)

    def _rename(self, temporary: str, path: str) -> None:
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            self._make_parent(path)
            os.replace(temporary, path)

    def _make_parent(self, path: str) -> None:
        """Create a subdirectory for its first chunk, or after the tree was removed."""
        self._restore_directory()
        Path(path.rpartition("/")[0]).mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def _restore_directory(self) -> None:
        """Create and lock the directory again if it was removed.

        Raises `disk_space.DirectoryInUseError` when another process was faster.
        """
        with self._relocking:
            if self._lock_fd is not None:
                if os.fstat(self._lock_fd).st_nlink:
                    return
                os.close(self._lock_fd)
                self._lock_fd = None
            if not self._is_closed:
                make_private(self.directory)
                self._lock_fd = lock_directory(self.directory, 0.0)

    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        """Read a file into the buffer and compare it with its seal. A damaged file is removed."""
        name = self._files.file(key)
        try:
            fd = os.open(name, self._flags | os.O_RDONLY)
        except FileNotFoundError as error:
            if not self._is_unmounted():
                self.space.vanished(key)
                return GetOutcome.MISSING
            self._report("read", error)
            return GetOutcome.FAILED
        except OSError as error:
            self._report("read", error)
            return GetOutcome.FAILED
        try:
            is_whole = self._file.read(fd, key, into)
        except OSError as error:
            self._report("read", error)
            return GetOutcome.FAILED
        finally:
            os.close(fd)
        self._report("read", None)
        if is_whole:
            return GetOutcome.OK
        logger.warning("disk tier: removed the damaged file %s", name)
        self.space.remove(name, key)
        return GetOutcome.DAMAGED

    def _is_unmounted(self) -> bool:
        """Whether missing files may return, because their file system is unmounted."""
        with self._relocking:
            return self._lock_fd is not None and is_unmounted(self.directory, self._lock_fd)

    def remove(self, key: bytes) -> None:
        """Remove a file if there is one; one that cannot be removed is tried again later."""
        if self.may_hold(key):
            self.space.recycle(self._files.file(key), key)

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        with self._relocking:
            self._is_closed = True
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def _report(self, operation: str, error: OSError | None) -> None:
        """Log the first error of a kind, and when that operation works again."""
        if error is not None and operation not in self._failing:
            self._failing.add(operation)
            logger.warning("disk tier: cannot %s in %s: %s", operation, self.directory, error)
        elif error is None and operation in self._failing:
            self._failing.discard(operation)
            logger.info("disk tier: can %s in %s again", operation, self.directory)
