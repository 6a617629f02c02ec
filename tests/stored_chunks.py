"""Finds chunks in the disk tier's files from outside, by their seals."""

import struct
from pathlib import Path

_PAGE_BYTES = 4096
_SEAL = struct.Struct("<6sHQ16s32sH")


def stored_chunks(root: Path) -> dict[bytes, tuple[Path, int]]:
    """Return the file and the offset of each chunk below a directory, by key.

    A chunk that was removed is among them until its slot is written again or becomes a hole.
    """
    found = {}
    for path in sorted(root.rglob("*.kv")):
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, _PAGE_BYTES):
                file.seek(start)
                page = file.read(_PAGE_BYTES)
                if page.startswith(b"WARMKV"):
                    *_, chunk_bytes, _, _, key_bytes = _SEAL.unpack_from(page)
                    pages = -(-chunk_bytes // _PAGE_BYTES)
                    key = page[_SEAL.size : _SEAL.size + key_bytes]
                    found[key] = path, start - pages * _PAGE_BYTES
    return found
