"""The directories of the disk tier: one per layout, each with one owner at a time."""

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger("vllm.warmroute")

_LAYOUT_NAME: Final = re.compile("[0-9a-f]{32}")


class DirectoryInUse(OSError):  # noqa: N818  (reads as the condition it is)
    """Another process has this directory; each replica needs one of its own."""


def lock_directory(directory: Path, wait_s: float) -> int:
    """Return a descriptor that keeps the directory until it is closed.

    Raises `DirectoryInUse` if another process keeps it for longer than ``wait_s``.
    """
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(0.05)
                continue
            os.close(fd)
            raise DirectoryInUse(
                errno.EBUSY,
                "local_disk is in use by another replica; give each replica a directory of its own",
                os.fspath(directory),
            ) from None
        return fd


def trim_others(root: Path, own: Path, budget_bytes: int) -> int:
    """Remove the oldest chunks of other layouts until they take no more than this.

    A model that is not served any more must not keep its disk for ever.
    Leaves alone what another process owns. Returns the bytes removed.
    """
    files: list[tuple[int, int, Path]] = []
    locks: list[int] = []
    try:
        for directory in _others(root, own):
            try:
                locks.append(lock_directory(directory, 0.0))
            except OSError:
                continue
            files.extend(_files(directory))
        return _remove_oldest(files, budget_bytes)
    finally:
        for fd in locks:
            os.close(fd)


def _others(root: Path, own: Path) -> Iterator[Path]:
    for directory in root.iterdir():
        is_layout = _LAYOUT_NAME.fullmatch(directory.name) and (directory / ".lock").exists()
        if is_layout and directory.name != own.name:
            yield directory


def _files(directory: Path) -> Iterator[tuple[int, int, Path]]:
    for path in directory.glob("??/*.kv*"):
        stat = path.stat()
        yield stat.st_mtime_ns, stat.st_size, path


def _remove_oldest(files: list[tuple[int, int, Path]], budget_bytes: int) -> int:
    excess_bytes = sum(size_bytes for _, size_bytes, _ in files) - budget_bytes
    removed_bytes = 0
    for _, size_bytes, path in sorted(files):
        if removed_bytes >= excess_bytes:
            break
        path.unlink(missing_ok=True)
        removed_bytes += size_bytes
    if removed_bytes:
        logger.info("disk tier: removed %d bytes of other models' chunks", removed_bytes)
    return removed_bytes
