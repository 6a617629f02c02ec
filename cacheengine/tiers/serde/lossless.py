"""Lossless compression of KV: byte planes, each entropy coded where that pays."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cacheengine.tiers.serde.base import Part, Serde, SerdeError
from cacheengine.tiers.serde.planes import WORD_TYPES, merge, piece_count, pieces, split
from cacheengine.tiers.serde.streams import StreamReader, assemble, shrink, stored_as_is

_HEADER_BYTES: Final = 1


class LosslessSerde(Serde):
    """Two thirds of the bytes for bfloat16 KV, and the very same bytes back.

    The header is one byte, the size of an element, so that what one engine
    wrote any other can read. Bytes after the last whole element are a stream
    of their own, the last. See `streams` for the rest of the format.
    """

    name = "lossless"
    code = 1
    is_exact = True

    def __init__(self, element_bytes: int) -> None:
        """``element_bytes``: 1, 2 or 4."""
        if element_bytes not in WORD_TYPES:
            raise ValueError(f"elements of {element_bytes} bytes; they must have 1, 2 or 4")
        self._element_bytes = element_bytes

    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return a header and the coded planes, or one byte and the payload."""
        whole_bytes = len(payload) - len(payload) % self._element_bytes
        words = np.frombuffer(payload[:whole_bytes], WORD_TYPES[self._element_bytes])
        streams = [shrink(plane) for piece in pieces(words) for plane in split(piece)]
        return assemble(bytes([self._element_bytes]), [*streams, payload[whole_bytes:]], payload)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill ``into`` with exactly the bytes that were encoded."""
        if stored_as_is(encoded, into):
            return
        element_bytes = encoded[0]
        if element_bytes not in WORD_TYPES:
            raise SerdeError(f"elements of {element_bytes} bytes")
        whole_bytes = len(into) - len(into) % element_bytes
        words = np.frombuffer(into[:whole_bytes], WORD_TYPES[element_bytes])
        count = piece_count(whole_bytes) * element_bytes + 1
        streams = StreamReader(encoded, _HEADER_BYTES, count)
        for piece in pieces(words):
            merge([streams.next(len(piece)) for _ in range(element_bytes)], piece)
        into[whole_bytes:] = streams.next(len(into) - whole_bytes).data
