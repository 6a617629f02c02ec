"""One of the disk tier's paths: files in a directory that is ours alone."""

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cacheengine.tiers.base import GetOutcome, PutOutcome
from cacheengine.tiers.disk.chunk_file import ChunkFile
from cacheengine.tiers.disk.directories import (
    DIRECTORY_MODE,
    FILE_MODE,
    is_away,
    lock_directory,
    make_private,
)
from cacheengine.tiers.disk.disk_space import DiskSpace

logger = logging.getLogger("vllm.warmroute")

_SUFFIX: Final = ".kv"
_NAME: Final = re.compile(r"(?P<key>([0-9a-f]{2})+)\.kv(?P<unfinished>(\.\d+)?\.tmp)?")
_NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class Found:
    """A whole file of an earlier life."""

    used_ns: int
    key: bytes
    path: str


class DiskPath:
    """Chunk files under ``<root>/<fingerprint>``, which is locked for its life (`DiskTier`)."""

    def __init__(
        self, root: Path, fingerprint: str, file: ChunkFile, space: DiskSpace, *, lock_wait_s: float
    ) -> None:
        self.directory = root / fingerprint
        self._prefix = f"{self.directory}/"
        self.reads_direct = False
        """Whether files that are not in the page cache are read past it."""
        self.writes_direct = False
        """Whether files are written past the page cache."""
        self._file = file
        self._space = space
        self._failing: set[str] = set()
        # Guards _lock_fd: two puts may find the directory gone at once.
        self._relocking = threading.Lock()
        self._is_closed = False
        make_private(self.directory)
        self._lock_fd: int | None = lock_directory(self.directory, lock_wait_s)

    def file(self, key: bytes) -> Path:
        """Return where a chunk's file is, or would be."""
        return Path(self._name(key))

    def _name(self, key: bytes) -> str:
        # Text, not a Path: making one takes as long as opening the file, and see `disk_space`.
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name}{_SUFFIX}"

    def scan(self) -> Iterator[Found]:
        """Yield the whole files; remove what a writer left or is of another size."""
        for subdirectory in os.scandir(self.directory):
            if subdirectory.is_dir(follow_symlinks=False) and len(subdirectory.name) == 2:
                for entry in os.scandir(subdirectory.path):
                    found = self._examine(entry)
                    if found is not None:
                        yield found

    def _examine(self, entry: "os.DirEntry[str]") -> Found | None:
        name = _NAME.fullmatch(entry.name)
        if name is None:
            return None
        stat = entry.stat(follow_symlinks=False)
        # The writer of an unfinished file is dead: we hold the directory's lock.
        if name["unfinished"] or stat.st_size != self._file.file_bytes:
            self._space.remove_leftover(entry.path, stat.st_size)
            return None
        return Found(stat.st_mtime_ns, bytes.fromhex(name["key"]), entry.path)

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Write a file under a temporary name, then rename it."""
        path = self._name(key)
        draft = self._space.take(path)
        if draft is None:
            return PutOutcome.NO_SPACE
        outcome = PutOutcome.FAILED
        exists = draft.is_spare
        try:
            fd = self._open_new(draft.path)
            exists = True
            try:
                self._file.write(fd, key, payload, may_be_direct=self.writes_direct)
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
                self._space.stored(path, key)
            else:
                self._space.failed(path, draft, exists=exists)
        if outcome is PutOutcome.STORED:
            self._report("write", None)
        return outcome

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._lock_fd is None:
            self._keep_directory()
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
        """Make a subdirectory for its first chunk, or after the tree was removed."""
        self._keep_directory()
        Path(path.rpartition("/")[0]).mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def _keep_directory(self) -> None:
        """Make and lock the directory anew if it was removed.

        Raises `directories.DirectoryInUseError` when another process was faster.
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
        """Read a file into the buffer and compare it with its seal."""
        name = self._name(key)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            if not self._is_away():
                self._space.vanished(name, key)
                return GetOutcome.MISSING
            self._report("read", error)
            return GetOutcome.FAILED
        except OSError as error:
            self._report("read", error)
            return GetOutcome.FAILED
        try:
            is_whole = self._file.read(fd, key, into, may_be_direct=self.reads_direct)
            if is_whole:
                _mark_used(fd)
        except OSError as error:
            self._report("read", error)
            return GetOutcome.FAILED
        finally:
            os.close(fd)
        self._report("read", None)
        if is_whole:
            return GetOutcome.OK
        logger.warning("disk tier: %s is damaged; removed", name)
        self._space.remove(name, key)
        return GetOutcome.DAMAGED

    def _is_away(self) -> bool:
        """Whether files that are not found may come back (`directories.is_away`)."""
        with self._relocking:
            return self._lock_fd is not None and is_away(self.directory, self._lock_fd)

    def remove(self, key: bytes) -> None:
        """Remove a file, now or as soon as that can be."""
        self._space.recycle(self._name(key), key)

    def close(self) -> None:
        """Give the directory free for another process. Idempotent."""
        with self._relocking:
            self._is_closed = True
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def _report(self, doing: str, error: OSError | None) -> None:
        """Log an error once, not for every chunk, until that works again."""
        if error is not None and doing not in self._failing:
            self._failing.add(doing)
            logger.warning("disk tier: cannot %s in %s: %s", doing, self.directory, error)
        elif error is None and doing in self._failing:
            self._failing.discard(doing)
            logger.info("disk tier: can %s in %s again", doing, self.directory)


def _mark_used(fd: int) -> None:
    """Keep the order of use for the next start, where the file system lets us."""
    with contextlib.suppress(OSError):
        os.utime(fd)
