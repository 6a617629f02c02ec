"""What stands before a blob on an InfiniStore server, which does not know its size."""

import struct
from typing import Final

_PREFIX: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"WARMSIZE"

PREFIX_BYTES: Final = _PREFIX.size


def prefix(size_bytes: int) -> bytes:
    """Return what stands before a blob of this size."""
    return _PREFIX.pack(_MAGIC, size_bytes)


def size_of(prefixed: bytes) -> int | None:
    """Return the size of the blob that this stands before; None when no put of ours made it."""
    magic, size_bytes = _PREFIX.unpack(prefixed)
    return int(size_bytes) if magic == _MAGIC else None
