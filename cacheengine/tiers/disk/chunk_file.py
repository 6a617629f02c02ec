"""One chunk in one file: its bytes, then a page that proves them.

The last page, the seal, is a pure function of layout, key and the checksum of
the bytes, so a file is intact exactly when its seal equals the one computed
from what was read: any changed byte anywhere is found. It stands at the end so
that the chunk starts where the file does: the page cache then holds it in
large pieces, and a truncated file has none.
"""

import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from cacheengine.bulk import checksum
from cacheengine.tiers.disk import linux_io
from cacheengine.tiers.disk.linux_io import PAGE_BYTES, set_direct

SEAL_BYTES: Final = 4096
_MAGIC: Final = b"WARMKV"
_VERSION: Final = 2
_FIXED: Final = struct.Struct("<6sHQ16s32sH")
_SAMPLE_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 256 * 1024
"""Hashed and copied one after the other: so much stays in a core's own cache in between."""

_Vectored = Callable[[int, Sequence[memoryview], int], int]


class ChunkFile:
    """How chunks of one layout are written to files and read back.

    ``file_bytes`` is the size of each. Any open file may be given; errors are
    OSError. The calls that take long hold no interpreter lock.
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
        """Fill a file that is empty or of this size, with ``may_be_direct`` past the page cache."""
        # All blocks at once: a full disk is known before a byte is copied, and
        # the file system has less to do for each.
        linux_io.reserve(fd, self.file_bytes)
        if not (may_be_direct and self._write_direct(fd, key, payload)):
            self._write_cached(fd, key, payload)

    def _write_direct(self, fd: int, key: bytes, payload: memoryview) -> bool:
        """Return False where that cannot be."""
        seal = self._seal_buffer()
        seal[:] = self._seal(key, checksum(payload))
        return _move_direct(os.pwritev, fd, [payload, seal]) is not None

    def _write_cached(self, fd: int, key: bytes, payload: memoryview) -> None:
        digest = xxhash.xxh3_128()
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            # Hashed first, which also brings the bytes near for the copy.
            digest.update(piece)
            _move_all(os.pwritev, fd, [piece], start)
        seal = self._seal(key, digest.digest())
        _move_all(os.pwritev, fd, [memoryview(seal)], len(payload))

    def read(self, fd: int, key: bytes, into: memoryview, *, may_be_direct: bool) -> bool:
        """Return whether the file was whole; ``into`` then holds its chunk.

        With ``may_be_direct`` a file that is not in the page cache is read
        past it.
        """
        if os.fstat(fd).st_size != self.file_bytes:
            return False
        seal = self._seal_buffer()
        if may_be_direct and not self._is_cached(fd):
            is_long_enough = _move_direct(os.preadv, fd, [into, seal])
        else:
            is_long_enough = None
        if is_long_enough is None:
            is_long_enough = _move_all(os.preadv, fd, [into, seal])
        return is_long_enough and seal.tobytes() == self._seal(key, checksum(into))

    def _seal_buffer(self) -> memoryview:
        """Return a page of memory for this thread: direct reads want it aligned."""
        buffer: memoryview | None = getattr(self._of_thread, "seal", None)
        if buffer is None:
            buffer = self._of_thread.seal = memoryview(mmap.mmap(-1, SEAL_BYTES))
        return buffer

    def _is_cached(self, fd: int) -> bool:
        """Whether the page cache has the file, going by a part of it."""
        length = min(_SAMPLE_BYTES, self.file_bytes)
        offset = (self.file_bytes - length) // 2 // PAGE_BYTES * PAGE_BYTES
        cached_bytes = linux_io.cached_bytes(fd, offset, length)
        return cached_bytes is None or 2 * cached_bytes >= length

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


def _move_direct(call: _Vectored, fd: int, buffers: Sequence[memoryview]) -> bool | None:
    """Do as `_move_all` does, past the page cache; None, and not so any more, where it cannot."""
    set_direct(fd, True)
    try:
        return _move_all(call, fd, buffers)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The memory is not aligned, or a call that was cut short left us in mid-page.
    set_direct(fd, False)
    return None


def _move_all(call: _Vectored, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> bool:
    """Read or write from an offset on until all is moved; False when the file ends before."""
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
