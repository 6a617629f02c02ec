"""The contract of a serde: a chunk's bytes to and from what the network carries.

A serde knows nothing of keys, checksums or servers: the remote tier's envelope
says which serde wrote a chunk (`Serde.code`) and whether the bytes are those
that were sent. A serde is nevertheless safe against any input: what it cannot
decode is a `SerdeError`, never a crash, and never more bytes than the chunk has.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cacheengine.bulk import copy

Part = memoryview | bytes
"""A run of encoded bytes. A view is of the payload itself: valid while that is."""


class SerdeError(Exception):
    """Encoded bytes that this serde did not write, or that changed since."""


class Serde(ABC):
    """Encodes and decodes chunks; safe to call from several threads at once.

    The heavy part of both calls runs without the interpreter lock.
    """

    name: str
    """What the configuration calls it."""
    code: int
    """What the envelope calls it; 0 to 255, never reused for other bytes."""
    is_exact: bool
    """Whether decoding gives the very bytes that were encoded."""
    is_identity: bool = False
    """Whether the encoded bytes are the payload itself: it may then be sent from
    its place and read into its place without a call of `encode` or `decode`."""

    @abstractmethod
    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return the encoded bytes, in parts that follow each other.

        A part may be a view of ``payload``, whose bytes must not change
        until the parts have been used. Does not modify ``payload``.
        """

    @abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill ``into``, whose size is that of the payload, from its encoded bytes.

        Raises `SerdeError` when they cannot be those of a payload of this
        size; what ``into`` then holds is undefined. Bytes that changed on the
        way need not be noticed: that is the envelope's checksum's part.
        """


class NaiveSerde(Serde):
    """Bytes as they are: nothing is computed, and nothing copied to encode."""

    name = "naive"
    code = 0
    is_exact = True
    is_identity = True

    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return the payload itself."""
        return (payload,)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Copy."""
        if len(encoded) != len(into):
            raise SerdeError(f"{len(encoded)} bytes for a chunk of {len(into)}")
        copy(into, encoded)
