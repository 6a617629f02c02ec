"""The directory of one layout: its lock, the names of its files, and the index of its chunks.

Chunks lie in slots of files ``<2 hex digits>.kv`` (`disk_path`). ``.index`` names them with their
slots, in the order in which they leave. It is written at the end, and now and then before. The
index of an orderly end has a mark: it names exactly what the slots hold. The next owner takes the
mark away before it writes anything. Without the mark, the index only tells the order. It has a
checksum, and a process that is killed leaves the former one or the new one.
"""

import contextlib
import errno
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from cacheengine.tiers.slot_file import FILE_MODE

_LAYOUT_NAME: Final = re.compile("[0-9a-f]{32}")
_LOCK_NAME: Final = ".lock"
_DIRECTORY_MODE: Final = 0o700
_LOCK_POLL_S: Final = 0.05
_FILE_NAME: Final = re.compile(r"[0-9a-f]{2}\.kv")
_HEAD: Final = struct.Struct("<8sI")
"""Magic, bytes of a key."""
_RECORD: Final = "<QQ{}s"
_MAGIC: Final = b"WARMSLOT"
_CHECKSUM_BYTES: Final = 16


class DirectoryInUseError(OSError):
    """Another process uses this directory; each replica needs its own."""


class LayoutDirectory:
    """A directory that is created for this user only, and locked until `release`. Thread-safe.

    Raises OSError, `DirectoryInUseError` when another process holds the lock for ``lock_wait_s``.
    """

    def __init__(self, path: Path, lock_wait_s: float) -> None:
        self._path = path
        self._index = path / ".index"
        # Guards _lock_fd: two puts may find the directory removed at the same time.
        self._relocking = threading.RLock()
        self._lock_fd: int | None = self._claim(lock_wait_s)

    def _claim(self, wait_s: float) -> int:
        self._path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's directory: its owner decides
            self._path.chmod(_DIRECTORY_MODE)
        return lock_directory(self._path, wait_s)

    def restore(self) -> None:
        """Create and lock the directory again if it was removed.

        Raises `DirectoryInUseError` when another process was faster.
        """
        with self._relocking:
            if self._lock_fd is None:
                raise OSError(errno.ESHUTDOWN, "the disk tier is closed", os.fspath(self._path))
            former = self._lock_fd
            if not os.fstat(former).st_nlink:
                self._lock_fd = self._claim(0.0)
                os.close(former)
            elif not self.is_there:
                raise OSError(errno.ENODEV, "not mounted", os.fspath(self._path))

    def release(self) -> None:
        """Unlock the directory. Idempotent."""
        with self._relocking:
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    @property
    def is_there(self) -> bool:
        """Whether the name leads to the directory that is locked: not removed, not unmounted."""
        with self._relocking, contextlib.suppress(OSError):
            lock_fd = self._lock_fd
            lock = (self._path / _LOCK_NAME).stat()
            return lock_fd is not None and os.path.samestat(os.fstat(lock_fd), lock)
        return False

    def file(self, number: int) -> str:
        """Return the path of a file of slots, whether it exists or not."""
        return f"{self._path}/{number:02x}.kv"

    def files(self) -> list[int]:
        """Return the numbers of the files that there are. Raises OSError."""
        return sorted(int(path.stem, 16) for path in slot_files(self._path))

    def save(self, chunks: Sequence[tuple[int, int, bytes]], *, is_exact: bool) -> None:
        """Write the index: place in the order (ns since the epoch), slot and key of each chunk.

        ``is_exact``: these are all chunks there are, and nothing is written later. Does nothing
        when the directory was removed or unmounted. Raises OSError.
        """
        if not self.is_there:
            return
        key_bytes = len(chunks[0][2]) if chunks else 0
        record = struct.Struct(_RECORD.format(key_bytes))
        parts = [_HEAD.pack(_MAGIC, key_bytes)]
        parts += [record.pack(*chunk) for chunk in chunks if len(chunk[2]) == key_bytes]
        content = b"".join(parts)
        content += self._checksum(content)
        if is_exact:
            content += self._checksum(content)
        draft = self._index.with_suffix(".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, FILE_MODE), "wb") as file:
            file.write(content)
        draft.replace(self._index)

    def take_index(self) -> tuple[dict[bytes, tuple[int, int]], bool]:
        """Return place and slot of each chunk, by key, and whether this is of an orderly end.

        Takes the mark of that away. There are none if the index is damaged.
        """
        try:
            fd = os.open(self._index, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "r+b") as file:
                body = self._checked(file.read())
                inner = None if body is None else self._checked(body)
                if body is not None and inner is not None:
                    file.truncate(len(body))
                    # Before anything else is written, for a power failure, too.
                    os.fsync(fd)
        except OSError:
            return {}, False
        content = body if inner is None else inner
        if content is None or len(content) < _HEAD.size or not content.startswith(_MAGIC):
            return {}, False
        record = struct.Struct(_RECORD.format(_HEAD.unpack_from(content)[1]))
        records = record.iter_unpack(memoryview(content)[_HEAD.size :])
        return {key: (place, slot) for place, slot, key in records}, inner is not None

    def _checked(self, content: bytes) -> bytes | None:
        """Return what is before a checksum that is right."""
        body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        return body if checksum == self._checksum(body) else None

    def _checksum(self, content: bytes) -> bytes:
        """Cover the layout's name, too: an index that was copied here from another is damaged."""
        return xxhash.xxh3_128(self._path.name.encode() + content).digest()


def slot_files(directory: Path) -> list[Path]:
    """Return the files of slots in a directory. Raises OSError."""
    return [path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name)]


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


def other_layouts(own: Path) -> Iterator[Path]:
    """Return the directories next to this one that an engine made. Raises OSError."""
    for directory in own.parent.iterdir():
        is_layout = _LAYOUT_NAME.fullmatch(directory.name) and (directory / _LOCK_NAME).exists()
        if is_layout and directory.name != own.name and not directory.is_symlink():
            yield directory
