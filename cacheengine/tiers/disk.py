"""The disk tier: one file per chunk.

``<root>/<fingerprint>/<first 2 hex digits>/<key in hex>.kv`` holds a header of
one page, then the payload. The header is a pure function of layout, key and
payload checksum, so a file is intact exactly when its header equals the one
computed from what was read: any changed byte anywhere is found.

A file is written under another name and renamed when whole. There is no
fsync: after a power failure a file may be damaged, which reading finds out.
"""

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from cacheengine.tiers.base import Chunk, GetOutcome, LocalTier, PutOutcome
from cacheengine.tiers.directories import lock_directory, trim_others

logger = logging.getLogger("vllm.warmroute")

HEADER_BYTES: Final = 4096
_MAGIC: Final = b"WARMKV"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<6sHIQ16s32sH")
_PIECE_BYTES: Final = 512 * 1024
_SUFFIX: Final = ".kv"
_TEMPORARY_SUFFIX: Final = ".tmp"
_NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOCK_WAIT_S: Final = 15.0


class DiskTier(LocalTier):
    """Files under ``root``, in a directory named by the layout's fingerprint.

    Takes an exclusive lock on that directory for its life: two owners would
    remove each other's half-written files and break the size limit. Raises
    `directories.DirectoryInUse` when another process keeps it (for ``lock_wait_s``, so
    that a predecessor may finish dying), and OSError when the directory
    cannot be made or written.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        payload_bytes: int,
        capacity_bytes: int,
        *,
        lock_wait_s: float = _LOCK_WAIT_S,
    ) -> None:
        self.directory = root / fingerprint
        self.capacity_bytes = capacity_bytes
        self.item_bytes = HEADER_BYTES + payload_bytes
        self._payload_bytes = payload_bytes
        self._fingerprint = fingerprint.encode()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd: int | None = lock_directory(self.directory, lock_wait_s)

    def path(self, key: bytes) -> Path:
        """Return where a chunk's file is, or would be."""
        name = key.hex()
        return self.directory / name[:2] / (name + _SUFFIX)

    def scan(self) -> list[bytes]:
        """Return the keys of whole files, least recently used first; remove the others.

        Also makes the chunks of other layouts fit into what this one leaves
        of the capacity, unless another process owns them.
        """
        found: list[tuple[int, bytes]] = []
        for subdirectory in os.scandir(self.directory):
            if subdirectory.is_dir() and len(subdirectory.name) == 2:
                for file in os.scandir(subdirectory.path):
                    self._examine(file, found)
        self._trim_others(len(found) * self.item_bytes)
        found.sort()
        return [key for _, key in found]

    def _trim_others(self, own_bytes: int) -> None:
        budget_bytes = max(0, self.capacity_bytes - own_bytes)
        try:
            trim_others(self.directory.parent, self.directory, budget_bytes)
        except OSError as error:
            logger.warning("disk tier: cannot look after other models' chunks: %s", error)

    def _examine(self, file: "os.DirEntry[str]", found: list[tuple[int, bytes]]) -> None:
        if file.name.endswith(_TEMPORARY_SUFFIX):
            # Its writer is dead: we hold the directory's lock.
            _unlink(Path(file.path))
            return
        key = _key_of(file.name)
        if key is None:
            return
        stat = file.stat(follow_symlinks=False)
        if stat.st_size == self.item_bytes:
            found.append((stat.st_mtime_ns, key))
        else:
            _unlink(Path(file.path))

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Write each file under a temporary name, then rename it."""
        return [self._put(key, payload) for key, payload in chunks]

    def _put(self, key: bytes, payload: memoryview) -> PutOutcome:
        path = self.path(key)
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        try:
            fd = _create(temporary)
            try:
                self._write(fd, key, payload)
            finally:
                os.close(fd)
            temporary.replace(path)
        except OSError as error:
            _unlink(temporary)
            logger.warning("disk tier: cannot write %s: %s", path, error)
            return PutOutcome.NO_SPACE if error.errno in _NO_SPACE_ERRORS else PutOutcome.FAILED
        return PutOutcome.STORED

    def _write(self, fd: int, key: bytes, payload: memoryview) -> None:
        checksum = xxhash.xxh3_128()
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            checksum.update(piece)
            _write_all(fd, piece, HEADER_BYTES + start)
        _write_all(fd, memoryview(self._header(key, checksum.digest())), 0)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read files into the buffers and compare each with its checksum."""
        return [self._get(key, into) for key, into in chunks]

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        path = self.path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return GetOutcome.MISSING
        except OSError as error:
            logger.warning("disk tier: cannot open %s: %s", path, error)
            return GetOutcome.FAILED
        try:
            intact = self._read(fd, key, into)
        except OSError as error:
            logger.warning("disk tier: cannot read %s: %s", path, error)
            return GetOutcome.FAILED
        finally:
            os.close(fd)
        if intact:
            _mark_used(path)
            return GetOutcome.OK
        logger.warning("disk tier: %s is damaged; removed", path)
        _unlink(path)
        return GetOutcome.DAMAGED

    def _read(self, fd: int, key: bytes, into: memoryview) -> bool:
        """Return whether the file was whole; ``into`` then holds its payload."""
        if os.fstat(fd).st_size != self.item_bytes:
            return False
        header = bytearray(HEADER_BYTES)
        # Read and hashed piece by piece, so that hashing finds the piece in the
        # processor's cache, and never holds the interpreter lock (which
        # xxhash does not release) longer than a piece takes.
        checksum = xxhash.xxh3_128()
        _read_all(fd, memoryview(header), 0)
        for start in range(0, len(into), _PIECE_BYTES):
            piece = into[start : start + _PIECE_BYTES]
            if not _read_all(fd, piece, HEADER_BYTES + start):
                return False
            checksum.update(piece)
        return header == self._header(key, checksum.digest())

    def _header(self, key: bytes, checksum: bytes) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            HEADER_BYTES,
            self._payload_bytes,
            checksum,
            self._fingerprint,
            len(key),
        )
        return (fixed + key).ljust(HEADER_BYTES, b"\0")

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove files."""
        for key in keys:
            _unlink(self.path(key))

    def close(self) -> None:
        """Give the directory free for another process."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        # The first chunk of its subdirectory, or someone removed the tree.
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def _read_all(fd: int, into: memoryview, offset: int) -> bool:
    """Fill ``into``; False when the file ends before."""
    while into:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            return False
        into = into[count:]
        offset += count
    return True


def _mark_used(path: Path) -> None:
    """Keep the order of use for the next start, where the file system lets us."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _key_of(file_name: str) -> bytes | None:
    stem, dot, suffix = file_name.partition(".")
    if dot + suffix != _SUFFIX:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("disk tier: cannot remove %s: %s", path, error)
