"""What is done to the files of a disk tier, behind the engine's back."""

import os
import random
from pathlib import Path
from typing import Final

_CUT: Final = 0.1
"""Share of the damaged files that are cut short instead."""
_BALLAST: Final = "ballast"
_STEP_BYTES: Final = 1 << 20


def flip_bits(directory: Path, files: int, rng: random.Random) -> int:
    """Damage so many chunks' files, or as many as there are; return how many were."""
    there = sorted(directory.rglob("*.kv"))
    chosen = rng.sample(there, min(files, len(there)))
    return sum(_is_damaged(path, rng) for path in chosen)


def _is_damaged(path: Path, rng: random.Random) -> bool:
    try:
        size_bytes = path.stat().st_size
        at = rng.randrange(max(1, size_bytes))
        if rng.random() < _CUT:
            os.truncate(path, at)
            return True
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            if not byte:
                return False
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    except FileNotFoundError:
        return False  # evicted meanwhile
    return True


def fill(directory: Path) -> None:
    """Take all that is left of the directory's file system, until `free`."""
    with (directory / _BALLAST).open("wb", buffering=0) as file:
        size_bytes = _STEP_BYTES
        while size_bytes:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size_bytes)
            except OSError:
                size_bytes //= 2


def free(directory: Path) -> None:
    """Give back what `fill` took."""
    (directory / _BALLAST).unlink(missing_ok=True)
