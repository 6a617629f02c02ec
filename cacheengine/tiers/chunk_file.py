"""One chunk in one file: its bytes, then a page that proves them.

The last page, the seal, is a pure function of the layout, the key and the checksum of the bytes.
A file is intact exactly when its seal equals the one computed from what was read, so any changed
byte is found. The seal is at the end so that the chunk starts where the file starts: the page
cache then holds it in large pages, and a truncated file has no seal.
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

import xxhash

from cacheengine.bulk import checksum

SEAL_BYTES: Final = 4096
_MAGIC: Final = b"WARMKV"
_VERSION: Final = 2
_FIXED: Final = struct.Struct("<6sHQ16s32sH")
_SAMPLE_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 256 * 1024
"""Bytes that are hashed, then copied: they stay in the core's cache in between."""

PAGE_BYTES: Final = 4096
"""Addresses, offsets and lengths of direct I/O are multiples of this."""
_CACHESTAT: Final = 451
"""The number of the system call on every architecture, since Linux 6.5."""
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

    def write(
        self, fd: int, key: bytes, payload: memoryview, *, may_be_direct: bool = False
    ) -> None:
        """Fill a file that is empty or of this size.

        With ``may_be_direct`` the file is written past the page cache where that works.
        """
        # All blocks at once: a full disk is noticed before a byte is copied, and the file system
        # has less to do for each block.
        reserve(fd, self.file_bytes)
        if not (may_be_direct and self._write_direct(fd, key, payload)):
            self._write_cached(fd, key, payload)

    def _write_direct(self, fd: int, key: bytes, payload: memoryview) -> bool:
        """Return False where direct I/O does not work."""
        seal = self._seal_buffer()
        seal[:] = self._seal(key, checksum(payload))
        return _move_direct(os.pwritev, fd, [payload, seal]) is not None

    def _write_cached(self, fd: int, key: bytes, payload: memoryview) -> None:
        digest = xxhash.xxh3_128()
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            # Hashing first also brings the bytes into the core's cache for the copy.
            digest.update(piece)
            _move_all(os.pwritev, fd, [piece], start)
        seal = self._seal(key, digest.digest())
        _move_all(os.pwritev, fd, [memoryview(seal)], len(payload))

    def read(self, fd: int, key: bytes, into: memoryview, *, may_be_direct: bool) -> bool:
        """Read a file; return whether it was intact, so that ``into`` holds its chunk.

        With ``may_be_direct`` a file that is not in the page cache is read past it.
        """
        if os.fstat(fd).st_size != self.file_bytes:
            return False
        seal = self._seal_buffer()
        is_long_enough: bool | None = None
        if may_be_direct and not self._is_cached(fd):
            is_long_enough = _move_direct(os.preadv, fd, [into, seal])
        if is_long_enough is None:
            is_long_enough = _move_all(os.preadv, fd, [into, seal])
        return is_long_enough and seal.tobytes() == self._seal(key, checksum(into))

    def _seal_buffer(self) -> memoryview:
        """Return this thread's page of memory. It is aligned, as direct I/O requires."""
        buffer: memoryview | None = getattr(self._of_thread, "seal", None)
        if buffer is None:
            buffer = self._of_thread.seal = memoryview(mmap.mmap(-1, SEAL_BYTES))
        return buffer

    def _is_cached(self, fd: int) -> bool:
        """Whether the page cache holds the file, judged by a sample in the middle."""
        length = min(_SAMPLE_BYTES, self.file_bytes)
        offset = (self.file_bytes - length) // 2 // PAGE_BYTES * PAGE_BYTES
        cached = cached_bytes(fd, offset, length)
        return cached is None or 2 * cached >= length

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


def _move_direct(call: _VectoredCall, fd: int, buffers: Sequence[memoryview]) -> bool | None:
    """Do `_move_all` past the page cache; return None, with direct I/O off, where it fails."""
    set_direct(fd, True)
    try:
        return _move_all(call, fd, buffers)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The memory is not aligned, or an interrupted call left the offset inside a page.
    set_direct(fd, False)
    return None


def _move_all(call: _VectoredCall, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> bool:
    """Read or write all buffers from an offset on; return False if the file ends before."""
    left = list(buffers)
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


# Calls of the Linux kernel that Python does not offer. Each has a fallback.


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


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Return how many bytes of a range are in the page cache; None where the kernel cannot say."""
    asked = (ctypes.c_uint64 * 2)(offset, length)
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0) != 0:
        return None
    return int(found[0]) * mmap.PAGESIZE


def why_not_direct(directory: Path, *, reads: bool = True) -> str | None:
    """Test whether direct I/O works in a directory; return the reason if it does not.

    Writes one page to a new file and reads it back. A file or link of that name is removed
    first, never written to. For ``reads``, the kernel must also report what is in the page cache.
    """
    probe = directory / ".probe"
    page = mmap.mmap(-1, PAGE_BYTES)
    page[:] = b"\x5a" * PAGE_BYTES
    try:
        probe.unlink(missing_ok=True)
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return str(error)
    try:
        set_direct(fd, True)
        os.pwritev(fd, [page], 0)
        back = mmap.mmap(-1, PAGE_BYTES)
        if os.preadv(fd, [back], 0) != PAGE_BYTES or back[:] != page[:]:
            return "a test file did not return what was written to it"
        if reads and cached_bytes(fd, 0, PAGE_BYTES) is None:
            return "the kernel cannot report what is in the page cache (cachestat, Linux 6.5)"
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def set_direct(fd: int, direct: bool) -> None:
    """Switch direct I/O (O_DIRECT) of an open file on or off. Raises OSError where it cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
