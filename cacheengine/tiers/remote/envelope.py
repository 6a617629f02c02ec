"""The form of a chunk in a remote store: its name, and the header before its bytes.

A blob is named ``warmroute:<layout fingerprint>:<key in hex>``, so that caches
of different models, types, block layouts or parallel layouts never meet. What
a lossy serde wrote has names of its own, with the serde's name after the
fingerprint: an engine that wants exact bytes must never find them.

The checksum covers the header's other fields, the fingerprint, the key and the
encoded bytes: any changed byte, another key's blob and another layout's are
found. A later version of this format must take another prefix than
``warmroute:``, or engines of the two versions would remove each other's blobs.
"""

import struct
from collections.abc import Iterable
from typing import Final

import xxhash

_MAGIC: Final = b"WARMBLOB"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sHHIQQ")
"""Magic, version, serde code, header bytes, payload bytes, encoded bytes."""
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES


class Envelope:
    """Names, writes and checks the blobs of one layout.

    ``payload_bytes`` is the size of a chunk. ``lossy_serde`` is the name of
    the serde, if it is one that does not give back the very bytes.
    """

    def __init__(self, fingerprint: str, payload_bytes: int, *, lossy_serde: str = "") -> None:
        suffix = f"-{lossy_serde}" if lossy_serde else ""
        self._prefix = f"warmroute:{fingerprint}{suffix}:"
        self._payload_bytes = payload_bytes

    def name(self, key: bytes) -> str:
        """Return what a chunk's blob is called."""
        return self._prefix + key.hex()

    def header(self, key: bytes, code: int, parts: Iterable[memoryview | bytes]) -> bytes:
        """Return the header of a chunk that the serde ``code`` encoded as ``parts``."""
        encoded = [memoryview(part) for part in parts]
        encoded_bytes = sum(part.nbytes for part in encoded)
        sizes = (HEADER_BYTES, self._payload_bytes, encoded_bytes)
        fields = _FIELDS.pack(_MAGIC, _VERSION, code, *sizes)
        checksum = xxhash.xxh3_128(fields)
        checksum.update(self._prefix.encode() + len(key).to_bytes(2, "little") + key)
        for part in encoded:
            checksum.update(part)
        return fields + checksum.digest()

    def serde_code(self, key: bytes, header: memoryview, encoded: memoryview) -> int | None:
        """Return which serde wrote a blob; None when it is not one of this key, intact."""
        code = int(_FIELDS.unpack_from(header)[2])
        # The header is a pure function of what it stands before, so equality is the whole check.
        return code if header == self.header(key, code, [encoded]) else None
