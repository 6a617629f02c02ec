"""One chunk in one file: its bytes, then a page that proves them.

The last page, the seal, is a pure function of the layout, the key and the checksum of the bytes.
A file is intact exactly when its seal equals the one computed from what was read, so any changed
byte is found. The seal is at the end so that the chunk starts where the file starts: the page
cache can hold it in large pages, and a truncated file has no seal.

A file that is opened with O_DIRECT is read and written past the page cache.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cacheengine.bulk import checksum

SEAL_BYTES: Final = 4096
_MAGIC: Final = b"WARMKV"
_VERSION: Final = 2
_FIXED: Final = struct.Struct("<6sHQ16s32sH")

PAGE_BYTES: Final = 4096
"""Addresses, offsets and lengths of direct I/O are multiples of this."""
_NOT_OFFERED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_VectoredCall = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


class ChunkFile:
    """Writes chunks of one layout to open files and reads them back.

    ``file_bytes`` is the size of each file. Errors are OSError. Calls that take long do not hold
    the GIL.
    """

    def __init__(self, fingerprint: str, payload_bytes: int) -> None:
        self.file_bytes = payload_bytes + SEAL_BYTES
        self.can_be_direct = payload_bytes % PAGE_BYTES == 0
        self._payload_bytes = payload_bytes
        self._fingerprint = fingerprint.encode()
        self._of_thread = threading.local()

    def write(self, fd: int, key: bytes, payload: memoryview, *, is_new: bool) -> None:
        """Fill a file that is empty (``is_new``) or of this size."""
        if is_new:
            # All blocks at once: a full disk is noticed before a byte is written, and the file
            # system has less to do for each block.
            reserve(fd, self.file_bytes)
        seal = self._seal_buffer()
        seal[:] = self._seal(key, checksum(payload))
        _move(os.pwritev, fd, [payload, seal])

    def read(self, fd: int, key: bytes, into: memoryview) -> bool:
        """Read a file; return whether it was intact, so that ``into`` holds its chunk."""
        seal = self._seal_buffer()
        is_long_enough = _move(os.preadv, fd, [into, seal])
        return is_long_enough and seal.tobytes() == self._seal(key, checksum(into))

    def _seal_buffer(self) -> memoryview:
        """Return this thread's page of memory. It is aligned, as direct I/O requires."""
        buffer: memoryview | None = getattr(self._of_thread, "seal", None)
        if buffer is None:
            buffer = self._of_thread.seal = memoryview(mmap.mmap(-1, SEAL_BYTES))
        return buffer

    def _seal(self, key: bytes, checksum: bytes) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            self._payload_bytes,
            checksum,
            self._fingerprint,
            len(key),
        )
        return (fixed + key).ljust(SEAL_BYTES, b"\0")


def _move(call: _VectoredCall, fd: int, buffers: Sequence[memoryview]) -> bool:
    """Do `_move_all`; by the page cache, with direct I/O off, where it fails past it."""
    try:
        return _move_all(call, fd, buffers)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The memory is not aligned, or an interrupted call left the offset inside a page.
    stop_direct(fd)
    return _move_all(call, fd, buffers)


def _move_all(call: _VectoredCall, fd: int, buffers: Sequence[memoryview]) -> bool:
    """Read or write all buffers; return False if the file ends before."""
    left, offset = list(buffers), 0
    while left:
        moved = call(fd, left, offset)
        if moved == 0:
            return False
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if left:
            left[0] = left[0][moved:]
    return True


def reserve(fd: int, size_bytes: int) -> bool:
    """Allocate all blocks of a file; return False where the file system cannot.

    Raises OSError, before a byte is written, when the disk is full.
    """
    length = ctypes.c_int64(size_bytes)
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), length) != 0:
        number = ctypes.get_errno()
        if number in _NOT_OFFERED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def why_not_direct(directory: Path) -> str | None:
    """Test whether direct I/O works in a directory; return the reason if it does not.

    Writes one page to a new file and reads it back. A file or link of that name is removed
    first, never written to.
    """
    probe = directory / ".probe"
    page, back = mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)
    page[:] = b"\x5a" * PAGE_BYTES
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        probe.unlink(missing_ok=True)
        fd = os.open(probe, flags, 0o600)
    except OSError as error:
        return str(error)
    try:
        os.pwritev(fd, [page], 0)
        if os.preadv(fd, [back], 0) != PAGE_BYTES or back[:] != page[:]:
            return "a test file did not return what was written to it"
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def stop_direct(fd: int) -> None:
    """Switch direct I/O (O_DIRECT) of an open file off."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
