"""The directories of the disk tier: one per layout, each with one owner at a time."""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger("vllm.warmroute")

_LAYOUT_NAME: Final = re.compile("[0-9a-f]{32}")
_LOCK_NAME: Final = ".lock"
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Chunks are prompts: text can be computed from them, and others of the machine have no part."""


class DirectoryInUseError(OSError):
    """Another process has this directory; each replica needs one of its own."""


def lock_directory(directory: Path, wait_s: float) -> int:
    """Return a descriptor that keeps the directory until it is closed.

    Raises `DirectoryInUseError` if another process keeps it for longer than ``wait_s``.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / _LOCK_NAME, flags, FILE_MODE)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(0.05)
                continue
            os.close(fd)
            raise DirectoryInUseError(
                errno.EBUSY,
                "local_disk is in use by another replica; give each replica a directory of its own",
                os.fspath(directory),
            ) from None
        return fd


def make_private(directory: Path) -> None:
    """Make a directory that is this user's alone, also one that an earlier version has left open.

    Those above it, which people name, are left as they are.
    """
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's directory: its owner decides
        directory.chmod(DIRECTORY_MODE)


def is_away(directory: Path, lock_fd: int) -> bool:
    """Whether a directory that is locked exists still, but not under its name.

    So it is while what is mounted there is taken away: its files are not lost.
    """
    try:
        lock = os.fstat(lock_fd)
        return lock.st_nlink > 0 and not os.path.samestat(lock, (directory / _LOCK_NAME).stat())
    except OSError:
        return True


class OtherLayouts:
    """The chunks of models that are not served any more, beside our own directories.

    They may stay while there is room. Another process's directories, and ones
    that no engine made, are neither counted nor touched. Not thread-safe.
    """

    def __init__(self, own: Sequence[Path]) -> None:
        self._files: list[tuple[int, int, Path]] = []
        for directory in own:
            try:
                self._collect(directory)
            except OSError as error:
                logger.warning("disk tier: cannot look after other models' chunks: %s", error)
        self._files.sort(reverse=True)  # the oldest is the first to pop
        self.used_bytes = sum(size_bytes for _, size_bytes, _ in self._files)
        """What they take, files that could not be removed included."""

    def _collect(self, own: Path) -> None:
        for directory in _others(own):
            with _locks() as is_locked:
                if is_locked(directory):
                    self._files += _files(directory)

    def shrink_to(self, budget_bytes: int) -> None:
        """Remove the oldest until they take no more than this, as far as that can be."""
        before_bytes = self.used_bytes
        with _locks() as is_locked:
            while self.used_bytes > budget_bytes and self._files:
                _, size_bytes, path = self._files.pop()
                # Taken by its owner since: then it counts against that one's limit.
                if not is_locked(path.parent.parent) or _is_removed(path):
                    self.used_bytes -= size_bytes
        if self.used_bytes < before_bytes:
            removed_bytes = before_bytes - self.used_bytes
            logger.info("disk tier: removed %d bytes of other models' chunks", removed_bytes)


def _is_removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("disk tier: cannot remove %s: %s", path, error)
        return False
    return True


@contextlib.contextmanager
def _locks() -> Iterator[Callable[[Path], bool]]:
    """Lend a function that locks directories, tried once each, for the length of the block."""
    with contextlib.ExitStack() as held:

        @functools.cache
        def is_locked(directory: Path) -> bool:
            try:
                held.callback(os.close, lock_directory(directory, 0.0))
            except OSError:
                return False
            return True

        yield is_locked


def _others(own: Path) -> Iterator[Path]:
    for directory in own.parent.iterdir():
        is_layout = _LAYOUT_NAME.fullmatch(directory.name) and (directory / _LOCK_NAME).exists()
        if is_layout and directory.name != own.name and not directory.is_symlink():
            yield directory


def _files(directory: Path) -> Iterator[tuple[int, int, Path]]:
    for path in directory.glob("??/*.kv*"):
        stat = path.lstat()
        yield stat.st_mtime_ns, stat.st_size, path
