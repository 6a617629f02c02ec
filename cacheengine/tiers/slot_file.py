"""A file of slots, and the page that proves the chunk in a slot.

A slot has a chunk's bytes, then a page, the seal: a pure function of the layout, the key and the
checksum of the bytes. A slot holds a chunk exactly if its seal equals the one that is computed from
what was read. So any changed byte is found, and a slot that was overwritten in part holds nothing.

With O_DIRECT, chunks are read and written past the page cache. Blocks are reserved before they are
written, and can be given back from the middle of a file. Errors are OSError. Calls that take long
do not hold the GIL.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cacheengine.bulk import checksum

SEAL_BYTES: Final = 4096
PAGE_BYTES: Final = 4096
"""Addresses, offsets and lengths of direct I/O are multiples of this."""
FILE_MODE: Final = 0o600
"""For this user only: the text of prompts can be computed from their chunks."""
_MAGIC: Final = b"WARMKV"
_VERSION: Final = 3
"""Raised when a seal changes, or the place of a slot in its file."""
_HEAD: Final = struct.Struct("<6sHQ16s32sH")
_NOT_OFFERED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_KEEP_SIZE_PUNCH_HOLE: Final = 0x01 | 0x02
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_VectoredCall = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


def slot_bytes(payload_bytes: int) -> int:
    """Return the size of a chunk in whole pages, with its seal."""
    return -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES + SEAL_BYTES


class ChunkSeal:
    """The seals of one layout."""

    def __init__(self, fingerprint: str, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.slot_bytes = slot_bytes(payload_bytes)
        self._fingerprint = fingerprint.encode()

    def of(self, key: bytes, payload: memoryview) -> bytes:
        """Return the seal of a chunk with these bytes."""
        return self._page(key, checksum(payload))

    def key_in(self, page: bytes) -> bytes | None:
        """Return the key that a page is a seal of; None if it is not a seal of this layout."""
        *_, digest, _, key_bytes = _HEAD.unpack_from(page)
        key = page[_HEAD.size : _HEAD.size + key_bytes]
        return key if key and page == self._page(key, digest) else None

    def _page(self, key: bytes, digest: bytes) -> bytes:
        head = _HEAD.pack(_MAGIC, _VERSION, self.payload_bytes, digest, self._fingerprint, len(key))
        return (head + key).ljust(SEAL_BYTES, b"\0")


class SlotFile:
    """An open file. It is closed with the last reference to it.

    So it may be dropped while a thread reads it, and its descriptor never names another file then.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str, flags: int) -> "SlotFile":
        """Open a file for reading and writing. Links are not followed."""
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return cls(os.open(path, flags, FILE_MODE))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        try:
            return not os.fstat(self._fd).st_nlink
        except OSError:
            return False

    def read(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fill all buffers; return False if the file ends before."""
        return self._move(os.preadv, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._move(os.pwritev, buffers, offset)

    def _move(self, call: _VectoredCall, buffers: Sequence[memoryview], offset: int) -> bool:
        try:
            return _move_all(call, self._fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The memory is not aligned, or an interrupted call left the offset inside a page: by the
        # page cache. Other threads go on past it.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _move_all(call, fd, buffers, offset)
        finally:
            os.close(fd)

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Allocate all blocks of a part, where the file system can.

        Raises OSError, before a byte is written, when the disk is full.
        """
        try:
            _fallocate(self._fd, 0, offset, size_bytes)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Free the blocks of a part, which reads as zeros then."""
        _fallocate(self._fd, _KEEP_SIZE_PUNCH_HOLE, offset, size_bytes)


def _move_all(call: _VectoredCall, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Read or write all buffers; return False if the file ends before."""
    left = [*reversed(buffers)]
    while left:
        moved = call(fd, left[::-1], offset)
        if moved == 0:
            return False
        offset += moved
        while left and moved >= len(left[-1]):
            moved -= len(left.pop())
        if left:
            left[-1] = left[-1][moved:]
    return True


def _fallocate(fd: int, mode: int, offset: int, size_bytes: int) -> None:
    start, length = ctypes.c_int64(offset), ctypes.c_int64(size_bytes)
    while _LIBC.fallocate(fd, mode, start, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def why_not_direct(directory: Path) -> str | None:
    """Test whether direct I/O works in a directory; return the reason if it does not.

    Writes one page to a new file and reads it back. A file or link of that name is removed
    first, never written to.
    """
    probe, page = directory / ".probe", mmap.mmap(-1, PAGE_BYTES)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        probe.unlink(missing_ok=True)
        fd = os.open(probe, flags, FILE_MODE)
        try:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
            probe.unlink()
    except OSError as error:
        return str(error)
    return None
