"""The disk tier's limit, and the files of layouts that are not served now.

The engine counts the chunks it knows. It cannot know of free slots, nor of the chunks of models
that are no longer served: all are counted here.
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cacheengine.tiers.layout_directory import lock_directory, other_layouts, slot_files

logger = logging.getLogger("vllm.warmroute")

_BLOCK_BYTES: Final = 512
"""The unit of `os.stat_result.st_blocks`."""
_FORMER_FILE: Final = re.compile(r"([0-9a-f]{2})+\.kv((\.\d+)?\.tmp)?")


class DiskBudget:
    """The bytes that the files of all paths may take together. Thread-safe.

    The lock is never held during I/O: a path that hangs does not stop the others.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # Otherwise two paths could count on the same space.
        self._lock = threading.Lock()
        self._used_bytes = 0

    def lacks(self, size_bytes: int) -> bool:
        """Whether this much more would exceed the limit."""
        return self._used_bytes + size_bytes > self.capacity_bytes

    def take(self, most: int, item_bytes: int) -> int:
        """Count as many items as there is space for, ``most`` at most; return how many."""
        with self._lock:
            count = min(most, max(0, self.capacity_bytes - self._used_bytes) // item_bytes)
            self._used_bytes += count * item_bytes
            return count

    def count(self, size_bytes: int) -> None:
        """Count bytes that are there; negative: that are gone."""
        with self._lock:
            self._used_bytes += size_bytes


class OtherLayouts:
    """The files of layouts that are not served now, in directories next to our own.

    They may stay while there is space. The layout that was not used for longest goes first, file
    by file. Directories of other processes, and directories that no engine made, are neither
    counted nor touched. What versions with a file for each chunk have left is removed. Not
    thread-safe.
    """

    def __init__(self, budget: DiskBudget) -> None:
        self._budget = budget
        # Files with their sizes, by directory; the next to go are the last.
        self._layouts: list[tuple[Path, list[tuple[Path, int]]]] = []

    def collect(self, own: Path) -> None:
        """Find them next to the directory of a path, which is locked."""
        removed = 0
        try:
            removed += self._remove_former(own)
            for path in other_layouts(own):
                with _locked(path) as is_free:
                    if is_free:
                        removed += self._remove_former(path)
                        self._count(path)
        except OSError as error:
            logger.warning("disk tier: cannot list the chunks of other models: %s", error)
        self._layouts.sort(key=lambda layout: _last_use_ns(layout[0]), reverse=True)
        if removed:
            logger.info(
                "disk tier: removed %d chunks in the format of earlier versions below %s",
                *(removed, own.parent),
            )

    def _count(self, directory: Path) -> None:
        files = [(path, allocated_bytes(path)) for path in slot_files(directory)]
        self._layouts.append((directory, files))
        self._budget.count(sum(size_bytes for _, size_bytes in files))

    def _remove_former(self, directory: Path) -> int:
        """Remove files of one chunk each; return how many. Counts files that stay."""
        removed = 0
        for path in directory.glob("[0-9a-f][0-9a-f]/*.kv*"):
            if _FORMER_FILE.fullmatch(path.name) and not path.parent.is_symlink():
                if _is_removed(path):
                    removed += 1
                else:
                    self._budget.count(allocated_bytes(path))
        for subdirectory in directory.glob("[0-9a-f][0-9a-f]"):
            with contextlib.suppress(OSError):  # somebody else's file is there
                subdirectory.rmdir()
        return removed

    def make_room(self, size_bytes: int) -> None:
        """Remove files until there is space for this much more, as far as possible."""
        removed_bytes = 0
        while self._layouts and self._budget.lacks(size_bytes):
            directory, files = self._layouts[-1]
            with _locked(directory) as is_free:
                while is_free and files and self._budget.lacks(size_bytes):
                    path, file_bytes = files.pop()
                    if _is_removed(path):
                        self._budget.count(-file_bytes)
                        removed_bytes += file_bytes
                if not is_free or not files:
                    # If its owner uses it again, it counts against the owner's limit.
                    self._budget.count(-sum(file_bytes for _, file_bytes in files))
                    self._layouts.pop()
        if removed_bytes:
            logger.info("disk tier: removed %d bytes of other models' chunks", removed_bytes)


def _last_use_ns(directory: Path) -> int:
    """Return when the index was written or, without one, when a file was added or removed."""
    for path in (directory / ".index", directory):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime_ns
    return 0


def allocated_bytes(path: Path) -> int:
    """Return the bytes of a file's blocks; 0 if they cannot be read."""
    try:
        return os.lstat(path).st_blocks * _BLOCK_BYTES
    except OSError:
        return 0


def _is_removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("disk tier: cannot remove %s: %s", path, error)
        return False
    return True


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a directory meanwhile; yields False where another process uses it."""
    try:
        fd = lock_directory(directory, 0.0)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)
