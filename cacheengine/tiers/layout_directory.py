"""A directory with the chunk files of one layout, and the index file that keeps their order.

The file of a chunk is ``<first 2 hex digits>/<key in hex>.kv``. ``.index`` names the chunks in the
order in which they leave, and the subdirectories' times of change at that moment. While these are
the same, the index replaces a listing: no file was added, renamed or removed since. Otherwise the
files are listed, and the index only tells their order. It has a checksum, and a process that is
killed leaves the former one or the new one. So it may know less than there is, never more.

Files are named by text, not by `Path`: a `Path` puts each part of a name into the interpreter's
table of interned strings. Short-lived names make that table, which has megabytes, be rebuilt
after some ten thousand of them, on whichever thread comes next.
"""

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""For this user only: the text of prompts can be computed from their chunks."""
TEMPORARY_SUFFIX: Final = ".tmp"
_SUFFIX: Final = ".kv"
_NAME: Final = re.compile(r"(?P<key>([0-9a-f]{2})+)\.kv(?P<unfinished>(\.\d+)?\.tmp)?")
_SUBDIRECTORY: Final = re.compile("[0-9a-f]{2}")
_HEAD: Final = struct.Struct("<8s16sI")
"""Magic, digest of the subdirectories' times of change, bytes of a key."""
_MAGIC: Final = b"WARMKEYS"
_UNKNOWN: Final = bytes(16)
"""In place of that digest: files may have changed while the index was written."""
_CHECKSUM_BYTES: Final = 16
Report = Callable[[OSError], None]
"""Is called for what cannot be listed, which is left where it is."""


class LayoutDirectory:
    """The chunk files in ``directory``. Its user holds the directory's lock.

    A time of use is in ns since the epoch: for chunks that the index names their place in its
    order, before the moment of its writing; for others that of the last writing, or a later one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._prefix = f"{directory}/"
        self._index = directory / ".index"

    def file(self, key: bytes) -> str:
        """Return the path of a chunk's file, whether it exists or not."""
        name = key.hex()
        return f"{self._prefix}{name[:2]}/{name}{_SUFFIX}"

    def size_bytes(self, report: Report) -> int:
        """Return what the files take, taking them for equally large. Reads names only."""
        count, each_bytes = 0, 0
        for entry in self._files(report):
            if not count:
                each_bytes = _size_and_time(entry, report)[0]
            count += 1
        return count * each_bytes

    def last_use_ns(self) -> int:
        """Return when the index was written or, without one, when a file was added or removed."""
        with contextlib.suppress(OSError):
            return self._index.stat().st_mtime_ns
        times = [0]
        with contextlib.suppress(OSError):
            times += [entry.stat().st_mtime_ns for entry in os.scandir(self.directory)]
        return max(times)

    def stored(
        self, file_bytes: int | None, remove: Callable[[str, int], object], report: Report
    ) -> dict[bytes, int]:
        """Return the times of use of the complete files.

        ``remove`` is called with path and size for unfinished files and files of another size
        (None: of any size).
        """
        changed, order = self._read_index()
        if order and changed == self._times_of_change():
            return order
        found: dict[bytes, int] = {}
        newest_ns = max(order.values(), default=0)
        for entry in self._files(report):
            name = _NAME.fullmatch(entry.name)
            assert name is not None
            key = bytes.fromhex(name["key"])
            if name["unfinished"] is None and key in order:
                found[key] = order[key]
                continue
            size_bytes, used_ns = _size_and_time(entry, report)
            # The writer of an unfinished file is gone: its user holds the directory's lock.
            if name["unfinished"] or size_bytes != (file_bytes or size_bytes):
                remove(entry.path, size_bytes)
            elif used_ns:
                found[key] = max(used_ns, newest_ns)
        return found

    def save(self, chunks: Sequence[tuple[int, bytes]], *, is_exact: bool) -> None:
        """Write the index: times of use and keys, the next to leave first. Raises OSError.

        ``is_exact``: these are all files there are, and no other thread changes any.
        """
        key_bytes = len(chunks[0][1]) if chunks else 0
        record = struct.Struct(f"<Q{key_bytes}s")
        changed = self._times_of_change() if is_exact else _UNKNOWN
        parts = [_HEAD.pack(_MAGIC, changed, key_bytes)]
        parts += [record.pack(*chunk) for chunk in chunks if len(chunk[1]) == key_bytes]
        content = b"".join(parts)
        draft = self._index.with_suffix(TEMPORARY_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, FILE_MODE), "wb") as file:
            file.write(content + self._checksum(content))
        draft.replace(self._index)

    def _read_index(self) -> tuple[bytes, dict[bytes, int]]:
        """Return the digest of times of change, and times of use by key; none if it is damaged."""
        try:
            fd = os.open(self._index, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                content = file.read()
        except OSError:
            return _UNKNOWN, {}
        content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if len(content) < _HEAD.size or checksum != self._checksum(content):
            return _UNKNOWN, {}
        magic, changed, key_bytes = _HEAD.unpack_from(content)
        record = struct.Struct(f"<Q{key_bytes}s")
        chunks = memoryview(content)[_HEAD.size :]
        if magic != _MAGIC or len(chunks) % record.size:
            return _UNKNOWN, {}
        return changed, {key: used_ns for used_ns, key in record.iter_unpack(chunks)}

    def _checksum(self, content: bytes) -> bytes:
        """Cover the layout's name, too: an index that was copied here from another is damaged."""
        return xxhash.xxh3_128(self.directory.name.encode() + content).digest()

    def _times_of_change(self) -> bytes:
        """Return a digest that differs after a file was added, renamed or removed."""
        digest = xxhash.xxh3_128()
        try:
            for path in sorted(self.directory.iterdir()):
                if _SUBDIRECTORY.fullmatch(path.name):
                    stat = path.lstat()
                    digest.update(f"{path.name} {stat.st_ino} {stat.st_mtime_ns}\0".encode())
        except OSError:
            return os.urandom(_CHECKSUM_BYTES)
        return digest.digest()

    def _files(self, report: Report) -> "Iterator[os.DirEntry[str]]":
        for subdirectory in _listed(str(self.directory), report):
            if _SUBDIRECTORY.fullmatch(subdirectory.name) and subdirectory.is_dir(
                follow_symlinks=False
            ):
                for entry in _listed(subdirectory.path, report):
                    if _NAME.fullmatch(entry.name):
                        yield entry


def _listed(directory: str, report: Report) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(directory) as entries:
            return [*entries]
    except OSError as error:
        report(error)
        return []


def _size_and_time(entry: "os.DirEntry[str]", report: Report) -> tuple[int, int]:
    """Return a file's size and its time of modification; zeros if they cannot be read."""
    try:
        stat = entry.stat(follow_symlinks=False)
    except OSError as error:
        report(error)
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
