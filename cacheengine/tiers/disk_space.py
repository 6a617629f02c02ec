"""The disk tier's space: its files are counted and removed here, its directories locked.

The engine counts the chunks it knows. It cannot know of files that could not be removed, nor of
chunks of models that are no longer served: both are counted here.

The file of a removed chunk is kept as a spare and overwritten with a new chunk. A new file needs
an inode and blocks, and a file system that has just removed many files finds these slowly (ext4
checks the inodes that it freed in the last seconds one by one).

Files are named by text, as in `layout_directory`.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cacheengine.tiers.layout_directory import (
    DIRECTORY_MODE,
    FILE_MODE,
    TEMPORARY_SUFFIX,
    LayoutDirectory,
)

logger = logging.getLogger("vllm.warmroute")

_RETRIES_A_PUT: Final = 2
_MOST_REMEMBERED: Final = 100_000

_LAYOUT_NAME: Final = re.compile("[0-9a-f]{32}")
_LOCK_NAME: Final = ".lock"
_LOCK_POLL_S: Final = 0.05


@dataclass(frozen=True)
class DraftFile:
    """A file to write a chunk into, under a temporary name."""

    path: str
    is_spare: bool
    """Whether the file exists, with the size of a chunk's file."""


class DiskSpace:
    """Counts the files of one path of a tier, and removes them. Thread-safe.

    ``spaces`` are those of all paths, which share ``capacity_bytes``. The lock, which is held
    during removals, is this path's alone: a path that hangs does not stop the others.

    ``used_bytes`` is never less than our files take. A file that somebody else removes stays
    counted until a read, a put or a removal of it finds out. The engine keeps the limit; so puts
    are refused here only while there are files that the engine does not count.
    """

    def __init__(
        self,
        capacity_bytes: int,
        item_bytes: int,
        spaces: "Sequence[DiskSpace]",
        *,
        most_spares: int,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._item_bytes = item_bytes
        self._spaces = spaces
        # Held during removals, too: otherwise two puts could count on the same space.
        self._lock = threading.Lock()
        self.used_bytes = 0
        """Bytes that our files take, including spares and files that could not be removed."""
        # The counted chunks whose files have their final names. The keys are the engine's own
        # objects.
        self._held: set[bytes] = set()
        self._others = OtherLayouts([], capacity_bytes)
        self._others_bytes = 0
        self._spares: list[str] = []
        self._most_spares = most_spares
        self._spare_numbers = itertools.count()
        # Files that could not be removed, with their sizes, in the order of the attempts.
        self._stuck: dict[str, int] = {}
        # Those of them that a put is overwriting: they must not be removed now.
        self._being_written: set[str] = set()
        self._has_lost_some = False

    def start_with(self, held: Iterable[bytes], others: "OtherLayouts") -> None:
        """Count what is on disk. Other layouts may use the space that is left."""
        with self._lock:
            self._held = set(held)
            self.used_bytes += len(self._held) * self._item_bytes
            self._others = others
            self._others_bytes = others.used_bytes

    def shrink_others(self) -> None:
        """Remove chunks of other layouts that are too many now."""
        with self._lock:
            self._shrink_others()

    def held(self) -> tuple[set[bytes], bool]:
        """Return the chunks that are counted, and whether all files of ours are theirs."""
        with self._lock:
            return {*self._held}, not (self._stuck or self._has_lost_some or self._spares)

    def may_hold(self, path: str, key: bytes) -> bool:
        """Whether there may be a file of a chunk here. Does not wait for other calls."""
        return key in self._held or path in self._stuck

    @property
    def _excess_bytes(self) -> int:
        used_bytes = sum(each.used_bytes + each._others_bytes for each in self._spaces)
        return max(0, used_bytes - self._capacity_bytes)

    @property
    def _has_uncounted(self) -> bool:
        """Whether there are files that the engine does not count."""
        return bool(self._stuck or self._has_lost_some or self._spares or self._others_bytes)

    def take(self, path: str) -> DraftFile | None:
        """Count a chunk's file before it is written; return None if there is no space.

        The caller must call `stored` or `failed` afterwards.
        """
        with self._lock:
            self._retry()
            if self._spares:
                draft = DraftFile(self._spares.pop(), is_spare=True)
            elif self._may_grow():
                draft = DraftFile(path + TEMPORARY_SUFFIX, is_spare=False)
            else:
                return None
            if path in self._stuck:
                self._being_written.add(path)
            return draft

    def _may_grow(self) -> bool:
        """Count one more file, and free space for it if possible.

        Spares and other layouts on another path stay: that path may hang. A put there uses them.
        """
        self.used_bytes += self._item_bytes
        self._shrink_others()
        if not self._excess_bytes or not any(each._has_uncounted for each in self._spaces):
            return True
        self.used_bytes -= self._item_bytes
        return False

    def stored(self, path: str, key: bytes) -> None:
        """Record that a chunk's file was written and renamed."""
        with self._lock:
            self._being_written.discard(path)
            # The rename replaced the file that was there.
            self.used_bytes -= self._stuck.pop(path, 0)
            self._forget(key)
            self._held.add(key)

    def vanished(self, key: bytes) -> None:
        """Record that a chunk's file does not exist, although it may be counted."""
        with self._lock:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        """Subtract a file that is gone, if it is counted."""
        if key in self._held:
            self._held.remove(key)
            self.used_bytes -= self._item_bytes

    def failed(self, path: str, draft: DraftFile, *, exists: bool) -> None:
        """Record that a file was not written; remove its draft."""
        with self._lock:
            self._being_written.discard(path)
            if not exists or not self._remove(draft.path, self._item_bytes):
                self.used_bytes -= self._item_bytes

    def recycle(self, path: str, key: bytes) -> None:
        """Remove an intact chunk; its file may be kept as a spare."""
        with self._lock:
            if len(self._spares) < self._most_spares:
                number = next(self._spare_numbers)
                spare = f"{path}.{number}{TEMPORARY_SUFFIX}"
                try:
                    os.rename(path, spare)
                except FileNotFoundError:
                    self._forget(key)
                    return
                except OSError:
                    pass  # removing it below fails, too, most likely, and is then logged
                else:
                    self._spares.append(spare)
                    self._held.discard(key)
                    return
            self._remove_chunk(path, key)

    def remove(self, path: str, key: bytes) -> None:
        """Remove a chunk's file. If that fails, it stays counted and is tried again later."""
        with self._lock:
            self._remove_chunk(path, key)

    def _remove_chunk(self, path: str, key: bytes) -> None:
        if self._remove(path, self._item_bytes):
            self._held.discard(key)
        else:
            self._forget(key)

    def remove_leftover(self, path: str, size_bytes: int) -> None:
        """Remove, in the same way, a file of any size that is not counted yet."""
        with self._lock:
            self.used_bytes += size_bytes
            self._remove(path, size_bytes)

    def remove_spares(self) -> None:
        with self._lock:
            while self._spares:
                self._remove(self._spares.pop(), self._item_bytes)

    def _remove(self, path: str, size_bytes: int) -> bool:
        """Remove a file and subtract its size; return False if there was no file."""
        try:
            if not _unlink(path):
                return False
        except OSError as error:
            if not self._stuck:
                logger.warning("disk tier: cannot remove %s, will try again: %s", path, error)
            if len(self._stuck) < _MOST_REMEMBERED:
                self._stuck[path] = size_bytes
            else:
                self._has_lost_some = True
        else:
            self.used_bytes -= size_bytes
        return True

    def _retry(self) -> None:
        resting = (path for path in self._stuck if path not in self._being_written)
        for path in list(itertools.islice(resting, _RETRIES_A_PUT)):
            # One that fails again goes to the end, so that the others are tried, too.
            self._remove(path, self._stuck.pop(path))

    def _shrink_others(self) -> None:
        excess_bytes = self._excess_bytes
        if excess_bytes and self._others_bytes:
            self._others.shrink_to(max(0, self._others_bytes - excess_bytes))
            self._others_bytes = self._others.used_bytes


def _unlink(path: str) -> bool:
    """Remove a file; return False if there was none. OSError if the file still exists."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # A read-only file system raises this for names that do not exist, too.
        if _is_known_to_be_absent(path):
            return False
        raise
    return True


def _is_known_to_be_absent(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class DirectoryInUseError(OSError):
    """Another process uses this directory; each replica needs its own."""


def lock_directory(directory: Path, wait_s: float) -> int:
    """Lock a directory; return a descriptor that holds the lock until it is closed.

    Raises `DirectoryInUseError` if another process holds the lock for longer than ``wait_s``.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / _LOCK_NAME, flags, FILE_MODE)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(_LOCK_POLL_S)
                continue
            os.close(fd)
            raise DirectoryInUseError(
                errno.EBUSY,
                "local_disk is in use by another replica; give each replica a directory of its own",
                os.fspath(directory),
            ) from None
        return fd


def make_private(directory: Path) -> None:
    """Create a directory for this user only; also restrict one that is open to others.

    Directories above it, which the operator names, are not changed.
    """
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's directory: its owner decides
        directory.chmod(DIRECTORY_MODE)


def is_unmounted(directory: Path, lock_fd: int) -> bool:
    """Whether a locked directory still exists, but not under its name.

    That is so while its file system is unmounted: the files are not lost.
    """
    try:
        lock = os.fstat(lock_fd)
        return lock.st_nlink > 0 and not os.path.samestat(lock, (directory / _LOCK_NAME).stat())
    except OSError:
        return True


@dataclass(slots=True)
class _OtherLayout:
    """A layout that is not served: its files, in the order of removal, are read when one must go.

    ``size_bytes`` is what is left of it, including files that could not be removed.
    """

    files: LayoutDirectory
    size_bytes: int
    order: list[bytes] | None = None
    """The chunks that are left, the oldest last; None: not read yet."""

    def remove_oldest(self) -> bool:
        """Remove one file; False if there is none, or none that can be removed."""
        if self.order is None:
            used_ns = self.files.stored(None, self._remove, _log_listing)
            self.order = sorted(used_ns, key=used_ns.__getitem__, reverse=True)
        while self.order:
            path = self.files.file(self.order.pop())
            size_bytes = _size_of(path)
            if size_bytes and self._remove(path, size_bytes):
                return True
        return False

    def _remove(self, path: str, size_bytes: int) -> bool:
        if not _is_removed(path):
            return False
        self.size_bytes -= min(size_bytes, self.size_bytes)
        return True


class OtherLayouts:
    """The chunks of layouts that are not served now, in directories next to our own.

    They may stay while there is space. The layout that was not used for longest goes first, its
    oldest chunks first. Directories of other processes, and directories that no engine made, are
    neither counted nor touched. Not thread-safe.
    """

    def __init__(self, own: Sequence[Path], capacity_bytes: int) -> None:
        # Removed at once, so that not each put has to remove some.
        self._batch_bytes = capacity_bytes // 100
        self._layouts: list[_OtherLayout] = []
        for directory in own:
            try:
                self._collect(directory)
            except OSError as error:
                _log_listing(error)
        # The one to remove first is the last.
        self._layouts.sort(key=lambda layout: layout.files.last_use_ns(), reverse=True)
        self._stuck_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that they take, including files that could not be removed."""
        return self._stuck_bytes + sum(layout.size_bytes for layout in self._layouts)

    def _collect(self, own: Path) -> None:
        for directory in _other_layouts(own):
            with _locks() as is_locked:
                if is_locked(directory):
                    files = LayoutDirectory(directory)
                    self._layouts.append(_OtherLayout(files, files.size_bytes(_log_listing)))

    def shrink_to(self, budget_bytes: int) -> None:
        """Remove the oldest files until the rest take at most this, as far as possible."""
        before_bytes = self.used_bytes
        if before_bytes <= budget_bytes or not self._layouts:
            return
        least_bytes, file_bytes = max(0, budget_bytes - self._batch_bytes), 0
        with _locks() as is_locked:
            while self._layouts:
                now_bytes = self.used_bytes
                if now_bytes <= budget_bytes and now_bytes - file_bytes < least_bytes:
                    break
                oldest = self._layouts[-1]
                if not is_locked(oldest.files.directory):
                    # Its owner uses it again: it counts against the owner's limit.
                    self._layouts.pop()
                elif not oldest.remove_oldest():
                    self._stuck_bytes += oldest.files.size_bytes(_log_listing)
                    self._layouts.pop()
                file_bytes = now_bytes - self.used_bytes
        removed_bytes = before_bytes - self.used_bytes
        if removed_bytes:
            logger.info("disk tier: removed %d bytes of other models' chunks", removed_bytes)


def _log_listing(error: OSError) -> None:
    logger.warning("disk tier: cannot list the chunks of other models: %s", error)


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _is_removed(path: str) -> bool:
    try:
        _unlink(path)
    except OSError as error:
        logger.warning("disk tier: cannot remove %s: %s", path, error)
        return False
    return True


@contextlib.contextmanager
def _locks() -> Iterator[Callable[[Path], bool]]:
    """Yield a function that locks a directory, tried once each, until the block ends."""
    with contextlib.ExitStack() as held:

        @functools.cache
        def is_locked(directory: Path) -> bool:
            try:
                held.callback(os.close, lock_directory(directory, 0.0))
            except OSError:
                return False
            return True

        yield is_locked


def _other_layouts(own: Path) -> Iterator[Path]:
    for directory in own.parent.iterdir():
        is_layout = _LAYOUT_NAME.fullmatch(directory.name) and (directory / _LOCK_NAME).exists()
        if is_layout and directory.name != own.name and not directory.is_symlink():
            yield directory
