"""A disk tier over directories of a test, and the chunks put into it and read back."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.slot_file import SEAL_BYTES
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, payload

FINGERPRINT = "0123456789abcdef" * 2
ITEM_BYTES = CHUNK_BYTES + SEAL_BYTES


def open_disk(*roots: Path, fingerprint: str = FINGERPRINT, chunks: int = 1000) -> DiskTier:
    """A tier with room for N chunks, which waits for no other owner of its directories."""
    return DiskTier(roots, fingerprint, CHUNK_BYTES, chunks * ITEM_BYTES, lock_wait_s=0.0)


def _aligned(chunks: list[bytes]) -> list[memoryview]:
    """Memory for these chunks as the pool's is."""
    memory = memoryview(mmap.mmap(-1, max(1, len(chunks)) * CHUNK_BYTES))
    starts = range(0, len(chunks) * CHUNK_BYTES, CHUNK_BYTES)
    return [memory[start : start + CHUNK_BYTES] for start in starts]


def put(tier: DiskTier, chunk: bytes) -> PutOutcome:
    """Put the bytes that belong to a key."""
    return put_all(tier, [chunk])[0]


def put_all(tier: DiskTier, chunks: list[bytes]) -> list[PutOutcome]:
    """Put chunks in one call."""
    buffers = _aligned(chunks)
    for chunk, buffer in zip(chunks, buffers, strict=True):
        buffer[:] = payload(chunk)
    return tier.put_many([*zip(chunks, buffers, strict=True)])


def get(tier: DiskTier, chunk: bytes) -> GetOutcome:
    """Get a chunk; AssertionError when its bytes do not belong to the key."""
    return get_all(tier, [chunk])[0]


def get_all(tier: DiskTier, chunks: list[bytes]) -> list[GetOutcome]:
    """Get chunks in one call."""
    buffers = _aligned(chunks)
    outcomes = tier.get_many([*zip(chunks, buffers, strict=True)])
    for chunk, outcome, buffer in zip(chunks, outcomes, buffers, strict=True):
        assert outcome is not GetOutcome.OK or buffer == payload(chunk)
    return outcomes


def place_of(tier: DiskTier, chunk: bytes) -> tuple[Path, int]:
    """The file of a chunk and the offset there; KeyError if no path holds it."""
    for path in tier._paths:
        if chunk in path:
            number, offset = path._place(path._held[chunk])
            return Path(path._owned.file(number)), offset
    raise KeyError(chunk)


def held_under(tier: DiskTier, root: Path) -> set[bytes]:
    """The keys of the chunks that a path holds."""
    (path,) = (each for each in tier._paths if each.directory.parent == root)
    return {*path._held}


def overwrite(place: tuple[Path, int], at: int, data: bytes) -> None:
    """Change bytes of a slot behind the tier's back."""
    with place[0].open("r+b") as file:
        file.seek(place[1] + at)
        file.write(data)


def flip(place: tuple[Path, int], at: int) -> None:
    """Flip a bit of a slot behind the tier's back."""
    with place[0].open("rb") as file:
        file.seek(place[1] + at)
        (byte,) = file.read(1)
    overwrite(place, at, bytes([byte ^ 0x10]))


def leave_unsaved(tier: DiskTier) -> None:
    """End a tier as a kill ends it: nothing is given back, and no index is written."""
    for path in tier._paths:
        path._owned.release()


def bytes_under(*roots: Path, item_bytes: int = ITEM_BYTES) -> int:
    """What the slots of all files below these directories take of the disk."""
    files = (file for root in roots for file in root.rglob("*.kv"))
    # A file in many pieces takes a block or two more, for the file system's list of them.
    return sum(file.stat().st_blocks * 512 // item_bytes * item_bytes for file in files)


def fail_below(root: Path, number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `os` as it is when the disk below a directory has gone bad.

    For functions of a path, and for those of a descriptor.
    """

    def call(file: "os.PathLike[str] | str | int", *args: object, **options: object) -> Any:
        path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(file)
        if path.is_relative_to(root) and path.name != ".probe":
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real(file, *args, **options)

    return call


def break_disk(patch: pytest.MonkeyPatch, root: Path, number: int, *names: str) -> None:
    """Let functions of `os` fail below a directory."""
    for name in names:
        patch.setattr(os, name, fail_below(root, number, getattr(os, name)))
