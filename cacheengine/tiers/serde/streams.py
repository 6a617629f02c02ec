"""What the compressing serdes share: byte streams, each entropy coded where that pays.

Encoded bytes are a header, whose first byte is not `AS_IS`, a table with the
stored length of each stream (u32, little-endian), then the streams. A stream
whose stored length is its true length is stored as it is; a shorter one is a
zstd frame. Or they are the byte `AS_IS`, then the payload.

The planes of floating-point numbers have no repetitions worth looking for, and
a match finder on noise finds short ones that cost more than they save. The
parameters leave it a table of 64 entries and matches of 7 bytes at least: what
remains is in effect zstd's Huffman coder, three times as fast as level 1 and
within 0.06 bits of a plane's entropy.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from cacheengine.tiers.serde.base import Part, SerdeError

Plane = npt.NDArray[np.uint8]

AS_IS: Final = 0

_WORTH_IT: Final = 1 - 1 / 64
"""Less saved than this is not worth decoding."""
_WINDOW_LOG: Final = 17
_PARAMETERS: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
)


def shrink(stream: Plane) -> Part:
    """Return a stream as it is to be stored: coded, or a view of itself."""
    if not stream.size:
        return b""
    # A compressor must not be used by two threads at once; making one costs microseconds.
    coded = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(stream.data)
    return coded if len(coded) < stream.size * _WORTH_IT else stream.data


def expand(stored: memoryview, size_bytes: int) -> Plane:
    """Return the stream of this size that was stored; raise `SerdeError` where it is none."""
    if len(stored) == size_bytes:
        return np.frombuffer(stored, np.uint8)
    if len(stored) > size_bytes:
        raise SerdeError(f"{len(stored)} bytes for a stream of {size_bytes}")
    try:
        # The frame's own word decides how much memory is taken: hence compared first.
        if zstandard.get_frame_parameters(stored).content_size != size_bytes:
            raise SerdeError("a stream is not of the size that was expected")
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        content = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SerdeError(f"a stream cannot be decompressed: {error}") from None
    if len(content) != size_bytes:
        raise SerdeError("a stream ends early")
    return np.frombuffer(content, np.uint8)


def assemble(header: bytes, streams: Sequence[Part], payload: memoryview) -> Sequence[Part]:
    """Return the encoded bytes in parts, the payload as it is unless the streams are less."""
    lengths = [len(stream) for stream in streams]
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    if len(header) + len(table) + sum(lengths) > len(payload):
        return (bytes([AS_IS]), payload)
    return (header + table, *(stream for stream in streams if stream))


def stored_as_is(encoded: memoryview, into: memoryview) -> bool:
    """Fill ``into`` if the payload was stored as it is, and say whether it was.

    Raises `SerdeError` when its size is another.
    """
    if not encoded:
        raise SerdeError("no bytes at all")
    if encoded[0] != AS_IS:
        return False
    if len(encoded) != 1 + len(into):
        raise SerdeError(f"{len(encoded) - 1} bytes stored of {len(into)}")
    # numpy copies without the interpreter lock.
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(encoded[1:], np.uint8))
    return True


class StreamReader:
    """The streams of encoded bytes, one after the other; raises `SerdeError` for any disorder."""

    def __init__(self, encoded: memoryview, header_bytes: int, count: int) -> None:
        self._rest = encoded[header_bytes + 4 * count :]
        try:
            lengths = struct.unpack_from(f"<{count}I", encoded, header_bytes)
        except struct.error:
            raise SerdeError("the table of streams is not whole") from None
        if sum(lengths) != len(self._rest):
            raise SerdeError(f"{len(self._rest)} bytes of streams instead of {sum(lengths)}")
        self._lengths = iter(lengths)

    def next(self, size_bytes: int) -> Plane:
        """Return the next stream, which must be of this size."""
        length = next(self._lengths)
        stored, self._rest = self._rest[:length], self._rest[length:]
        return expand(stored, size_bytes)
