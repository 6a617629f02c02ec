"""Hashing and copying of large buffers without the interpreter's lock (GIL).

Python's own operations hold it: `bytes(view)`, ``view[:] = other``, and the one-call digests of
older xxhash (3.5 does, 4.1 does not). An operation that holds it for a millisecond delays the
scheduler's next step.
"""

import contextlib
import ctypes
import mmap
import time
from typing import Final

import xxhash

_LARGE_BYTES: Final = 64 * 1024
"""Fewer bytes are copied in microseconds: faster than releasing and taking the lock again."""
_PIECE_BYTES: Final = 512 * 1024


def checksum(payload: memoryview) -> bytes:
    """Return the XXH3 digest of 128 bits."""
    # `update` releases the lock in every version.
    digest = xxhash.xxh3_128()
    digest.update(payload)
    return digest.digest()


def copy(into: memoryview, source: memoryview | bytes) -> None:
    """Fill ``into`` with ``source``; raises ValueError if their lengths differ."""
    if len(source) != len(into):
        raise ValueError(f"{len(source)} bytes cannot fill {len(into)}")
    if len(source) < _LARGE_BYTES:
        into[:] = source
    elif isinstance(source, memoryview) and source.readonly:
        # ctypes cannot get its address: copied in pieces, so that no single one takes long.
        for start in range(0, len(source), _PIECE_BYTES):
            into[start : start + _PIECE_BYTES] = source[start : start + _PIECE_BYTES]
    else:
        target = ctypes.c_char.from_buffer(into)
        begin = source if isinstance(source, bytes) else _address(source)
        ctypes.memmove(ctypes.addressof(target), begin, len(source))


def private_copy(source: memoryview) -> memoryview:
    """Return a copy in memory of its own, which is freed with the last view of it."""
    # Not `bytes`: that faults in its memory page by page, and holds the lock meanwhile.
    memory = mmap.mmap(-1, max(1, len(source)))
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    made = memoryview(memory)[: len(source)]
    copy(made, source)
    return made


def let_go(parts: list[memoryview | bytes]) -> None:
    """Empty a list, releasing the lock after each large object that has memory of its own.

    The system takes the memory back in 0.2 ms a megabyte, with the lock held.
    """
    while parts:
        is_large = isinstance(parts[-1], bytes) and len(parts[-1]) >= _LARGE_BYTES
        parts.pop()
        if is_large:
            time.sleep(0)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
