"""The contract of a serde: how the bytes of a chunk are encoded for the remote tier.

A serde knows nothing of keys, checksums or servers. The remote tier's envelope says which serde
wrote a chunk (`Serde.code`) and whether the bytes are intact. A serde still accepts any input: for
bytes that it cannot decode it raises `SerdeError`, and it never produces more bytes than the chunk
has.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cacheengine.bulk import copy

Part = memoryview | bytes
"""A run of encoded bytes. A view is of the payload itself, and valid as long as that is."""


class SerdeError(Exception):
    """The encoded bytes are not what this serde writes for a chunk of this size."""


class Serde(ABC):
    """Encodes and decodes chunks. Thread-safe; the heavy part of both calls releases the GIL."""

    name: str
    """The value of ``remote_serde``."""
    code: int
    """Its number in the envelope: 0 to 255, never reused for another encoding."""
    is_exact: bool
    """Whether decoding returns exactly the bytes that were encoded."""
    is_identity: bool = False
    """Whether the encoded bytes are the payload itself. They are then sent from the pool and
    received into it without a call of `encode` or `decode`."""

    @abstractmethod
    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return the encoded bytes, in consecutive parts.

        A part may be a view of ``payload``, whose bytes must not change until the parts have
        been used. Does not modify ``payload``.
        """

    @abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill ``into``, which has the size of the payload, from its encoded bytes.

        Raises `SerdeError` when they cannot be those of a payload of this size; the content of
        ``into`` is then undefined. Changed bytes need not be noticed: the envelope's checksum
        finds them.
        """


class NaiveSerde(Serde):
    """The bytes as they are."""

    name = "naive"
    code = 0
    is_exact = True
    is_identity = True

    def encode(self, payload: memoryview) -> Sequence[Part]:
        return (payload,)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        if len(encoded) != len(into):
            raise SerdeError(f"{len(encoded)} bytes for a chunk of {len(into)}")
        copy(into, encoded)
