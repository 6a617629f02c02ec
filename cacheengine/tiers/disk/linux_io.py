"""Calls of the Linux kernel that Python does not offer, each with a way to do without."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
"""What O_DIRECT wants addresses, offsets and lengths to be multiples of, at most."""

_CACHESTAT: Final = 451
"""The number of the system call on every architecture; there since Linux 6.5."""
_NOT_OFFERED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, size_bytes: int) -> bool:
    """Give a file all its blocks at once; False where the file system cannot.

    Raises OSError, before a byte is written, when there is no room.
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
    """Return how much of a range the page cache has; None where the kernel does not say."""
    asked = (ctypes.c_uint64 * 2)(offset, length)
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    if _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0) != 0:
        return None
    return int(found[0]) * mmap.PAGESIZE


def why_not_direct(directory: Path, *, reads: bool = True) -> str | None:
    """Try out whether I/O may bypass the page cache here; return what stands against it.

    Writes and reads back one page of a file of its own; one that was there before, a link
    too, is taken away, and never written to. For ``reads`` the kernel must also say what the
    page cache has.
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
            return "what was read is not what was written"
        if reads and cached_bytes(fd, 0, PAGE_BYTES) is None:
            return "the kernel does not say what the page cache has (cachestat, Linux 6.5)"
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def set_direct(fd: int, direct: bool) -> None:
    """Make I/O of an open file bypass the page cache, or not; OSError where it cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
