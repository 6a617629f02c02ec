"""The compressing serdes of the remote tier: lossless, and lossy after CacheGen.

Encoded bytes are a header, whose first byte is not `AS_IS`, a table with the stored length of
each stream (u32, little-endian), then the streams. A stream whose stored length is its true
length is stored as it is; a shorter one is a zstd frame. A payload that does not shrink is stored
as the byte `AS_IS` and the payload.

Numbers are split into byte planes: the first bytes of all of them, then the second bytes, and so
on. In floating-point numbers the high bytes (sign and exponent) are alike and the low bytes are
noise, so coding them separately pays. Planes contain no repetitions worth searching for, and a
match finder on noise finds short matches that cost more than they save. The zstd parameters leave
the finder a table of 64 entries and matches of at least 7 bytes. What remains is in effect zstd's
Huffman coder: 3x as fast as level 1, and within 0.06 bits of a plane's entropy.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from cacheengine.tiers.serde import Part, Serde, SerdeError

Plane = npt.NDArray[np.uint8]

AS_IS: Final = 0

_WORTH_IT: Final = 1 - 1 / 64
"""A stream that saves less is not worth decoding, and is stored as it is."""
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
    """Return a stream as it is stored: compressed, or a view of itself."""
    if not stream.size:
        return b""
    # A compressor must not be used by two threads at once; creating one takes microseconds.
    coded = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(stream.data)
    return coded if len(coded) < stream.size * _WORTH_IT else stream.data


def expand(stored: memoryview, size_bytes: int) -> Plane:
    """Return the stream of this size that was stored; raise `SerdeError` if it is not one."""
    if len(stored) == size_bytes:
        return np.frombuffer(stored, np.uint8)
    if len(stored) > size_bytes:
        raise SerdeError(f"{len(stored)} bytes for a stream of {size_bytes}")
    try:
        # Compared first: zstd allocates as much memory as the frame claims.
        if zstandard.get_frame_parameters(stored).content_size != size_bytes:
            raise SerdeError("a stream has another size than expected")
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        content = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SerdeError(f"a stream cannot be decompressed: {error}") from None
    if len(content) != size_bytes:
        raise SerdeError("a stream ends early")
    return np.frombuffer(content, np.uint8)


def assemble(header: bytes, streams: Sequence[Part], payload: memoryview) -> Sequence[Part]:
    """Return the encoded bytes in parts: the streams, or the payload if that is not longer."""
    lengths = [len(stream) for stream in streams]
    table = struct.pack(f"<{len(lengths)}I", *lengths)
    if len(header) + len(table) + sum(lengths) > len(payload):
        return (bytes([AS_IS]), payload)
    return (header + table, *(stream for stream in streams if stream))


def stored_as_is(encoded: memoryview, into: memoryview) -> bool:
    """Fill ``into`` if the payload was stored as it is; return whether it was.

    Raises `SerdeError` when its size differs from that of ``into``.
    """
    if not encoded:
        raise SerdeError("there are no bytes")
    if encoded[0] != AS_IS:
        return False
    if len(encoded) != 1 + len(into):
        raise SerdeError(f"{len(encoded) - 1} bytes stored of {len(into)}")
    # numpy copies without the GIL.
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(encoded[1:], np.uint8))
    return True


class StreamReader:
    """The streams of encoded bytes, in order; raises `SerdeError` if they are malformed."""

    def __init__(self, encoded: memoryview, header_bytes: int, count: int) -> None:
        self._rest = encoded[header_bytes + 4 * count :]
        try:
            lengths = struct.unpack_from(f"<{count}I", encoded, header_bytes)
        except struct.error:
            raise SerdeError("the table of streams is incomplete") from None
        if sum(lengths) != len(self._rest):
            raise SerdeError(f"{len(self._rest)} bytes of streams instead of {sum(lengths)}")
        self._lengths = iter(lengths)

    def next(self, size_bytes: int) -> Plane:
        """Return the next stream, which must be of this size."""
        length = next(self._lengths)
        stored, self._rest = self._rest[:length], self._rest[length:]
        return expand(stored, size_bytes)


Words = npt.NDArray[np.unsignedinteger[Any]]

PIECE_BYTES: Final = 4 << 20
"""Bytes encoded at once: intermediate results then stay in the processor's cache. A multiple of
every element size. Part of the format."""

WORD_TYPES: Final[Mapping[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}
"""Word types by the bytes of an element."""


def pieces(words: Words) -> Iterator[Words]:
    """Yield the parts of ``words`` that are encoded at once, as views."""
    step = PIECE_BYTES // words.itemsize
    for start in range(0, len(words), step):
        yield words[start : start + step]


def piece_count(payload_bytes: int) -> int:
    """Return how many pieces a payload has."""
    return -(-payload_bytes // PIECE_BYTES)


def split(words: Words) -> list[Plane]:
    """Return the planes of numbers, lowest bytes first."""
    if words.itemsize == 1:
        return [words.view(np.uint8)]
    planes = [np.empty(len(words), np.uint8) for _ in range(words.itemsize)]
    for number, plane in enumerate(planes):
        # A shift that drops the high bytes is several times as fast as a strided copy.
        np.right_shift(words, 8 * number, out=plane, casting="unsafe")
    return planes


def merge(planes: Sequence[Plane], into: Words) -> None:
    """Fill ``into`` from its planes."""
    np.copyto(into, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(into, 8, out=into)
        np.bitwise_or(into, plane, out=into)


_LOSSLESS_HEADER_BYTES: Final = 1


class LosslessSerde(Serde):
    """Byte planes, compressed: bfloat16 KV takes two thirds of its bytes. Exact.

    The header is one byte, the size of an element, so that any engine can read what another
    wrote. Bytes after the last complete element are the last stream.
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
        """Return a header and the compressed planes, or one byte and the payload."""
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
        streams = StreamReader(encoded, _LOSSLESS_HEADER_BYTES, count)
        for piece in pieces(words):
            merge([streams.next(len(piece)) for _ in range(element_bytes)], piece)
        into[whole_bytes:] = streams.next(len(into) - whole_bytes).data


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class FloatFormat:
    """A number format of KV that can be quantized. Its numbers are given as words of bits."""

    code: int
    element_bytes: int
    magnitude: int
    """Mask of all bits but the sign. Masked numbers compare as their absolute values do."""
    least: int
    """The smallest value that quantizing accepts as the largest magnitude of a group."""
    most: int
    """The largest value that it accepts: below infinity, and so that no product overflows."""
    rounding: float
    """Largest relative error of rounding a number to this format."""
    numpy_type: type[np.floating[Any]] | None
    """None for bfloat16, which numpy does not have: it is the upper half of a float32."""

    @property
    def word_type(self) -> "np.dtype[np.unsignedinteger[Any]]":
        """The type of the words."""
        return WORD_TYPES[self.element_bytes]

    def to_floats(self, words: Words) -> Floats:
        """Return the numbers as float32; float32 words are not copied."""
        if self.numpy_type is not None:
            return words.view(self.numpy_type).astype(np.float32, copy=False)
        wide = words.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)

    def from_floats(self, floats: Floats, into: Words) -> None:
        """Round the numbers into the words; may modify ``floats``."""
        if self.numpy_type is not None:
            np.copyto(into.view(self.numpy_type), floats, casting="same_kind")
            return
        bits = floats.view(np.uint32)
        # To the nearest; of two equally near numbers to the larger.
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=into, casting="unsafe")


FLOAT_FORMATS: Final[Mapping[str, FloatFormat]] = {
    "bfloat16": FloatFormat(
        code=1,
        element_bytes=2,
        magnitude=0x7FFF,
        least=(127 - 100) << 7,  # 2**-100
        most=(127 + 100) << 7,  # 2**100
        rounding=2.0**-8,
        numpy_type=None,
    ),
    "float16": FloatFormat(
        code=2,
        element_bytes=2,
        magnitude=0x7FFF,
        # The smallest normal number: below it the rounding error is not relative.
        least=1 << 10,  # 2**-14
        most=0x7BFF,  # 65504, the largest number
        rounding=2.0**-11,
        numpy_type=np.float16,
    ),
    "float32": FloatFormat(
        code=3,
        element_bytes=4,
        magnitude=0x7FFFFFFF,
        least=(127 - 100) << 23,
        most=(127 + 100) << 23,
        rounding=2.0**-24,
        numpy_type=np.float32,
    ),
}
"""The formats by vLLM's names."""


GROUP: Final = 64
"""Consecutive elements that share a scale. Where heads have a multiple of 64 elements, these
belong to one token and head in every layout of vLLM. A divisor of a piece's elements. Part of the
format."""

DEFAULT_STEPS: Final = 31
"""Steps to each side of zero. 127 has about twice the error of bfloat16 itself; 7 is 4 bits."""
_MAX_STEPS: Final = 127
_CACHEGEN_HEADER: Final = struct.Struct("<BB")
_PRODUCT_ERROR: Final = 2.0**-20
"""An upper bound of the error that the float32 arithmetic adds."""


class CacheGenSerde(Serde):
    """Lossy compression after CacheGen: answers from such KV differ. Never used unless configured.

    Every element becomes a multiple of a ``steps``-th of its group's largest magnitude.

    The error of an element, and so the root mean square of a group's errors,
    is at most `max_error` times the largest magnitude in its group. Groups in
    which that cannot be kept (infinities, NaN, magnitudes near the ends of the
    format) are stored exactly, as are elements after the last whole group.
    The sign of a zero is lost.

    A piece has these streams: the planes of the groups' scales, one byte for each element, the
    exact groups. The scale of an exact group has all bits set.
    Not compatible with LMCache's streams of the same name.
    """

    name = "cachegen"
    code = 2
    is_exact = False

    def __init__(self, dtype: str, steps: int = DEFAULT_STEPS) -> None:
        """``steps`` to each side of zero, 1 to 127. Raises ValueError for KV that is not floats."""
        if dtype not in FLOAT_FORMATS:
            raise ValueError(
                f"cachegen quantizes {', '.join(FLOAT_FORMATS)} KV, not {dtype}; "
                "use lossless, or naive"
            )
        if not 1 <= steps <= _MAX_STEPS:
            raise ValueError(f"{steps} steps; 1 to {_MAX_STEPS} are possible")
        self._format = FLOAT_FORMATS[dtype]
        self._steps = steps

    @property
    def max_error(self) -> float:
        """The largest error of an element, as a share of its group's largest magnitude."""
        return 0.5 / self._steps + self._format.rounding + _PRODUCT_ERROR

    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return a header and the compressed streams, or one byte and the payload."""
        whole_bytes = _whole_bytes(len(payload), self._format)
        words = np.frombuffer(payload[:whole_bytes], self._format.word_type)
        streams: list[Part] = []
        for piece in pieces(words):
            streams += map(shrink, _quantize(piece.reshape(-1, GROUP), self._format, self._steps))
        header = _CACHEGEN_HEADER.pack(self._format.code, self._steps)
        return assemble(header, [*streams, payload[whole_bytes:]], payload)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill ``into`` with the payload, changed by at most `max_error` of the encoder."""
        if stored_as_is(encoded, into):
            return
        form, steps = _read_header(encoded)
        whole_bytes = _whole_bytes(len(into), form)
        words = np.frombuffer(into[:whole_bytes], form.word_type)
        count = piece_count(whole_bytes) * (form.element_bytes + 2) + 1
        streams = StreamReader(encoded, _CACHEGEN_HEADER.size, count)
        for piece in pieces(words):
            _restore(streams, piece.reshape(-1, GROUP), form, steps)
        into[whole_bytes:] = streams.next(len(into) - whole_bytes).data


def _whole_bytes(payload_bytes: int, form: FloatFormat) -> int:
    """Return the bytes of the complete groups of a payload."""
    return payload_bytes - payload_bytes % (GROUP * form.element_bytes)


def _quantize(groups: Words, form: FloatFormat, steps: int) -> list[Plane]:
    """Return the streams of a piece, given as ``[groups, GROUP]``."""
    scales = np.bitwise_and(groups, form.magnitude).max(axis=1)
    exact = (scales > form.most) | ((scales < form.least) & (scales != 0))
    kept = groups[exact]
    if len(kept):
        groups = groups.copy()
        groups[exact] = 0
        scales[exact] = 0
    values = form.to_floats(groups) * _factors(scales, form, steps)[:, np.newaxis]
    # Rounds to the nearest: the conversion below drops the fraction.
    np.add(values, np.float32(steps + 0.5), out=values)
    codes = values.astype(np.uint8).ravel()
    scales[exact] = _exact_mark(scales)
    return [*split(scales), codes, kept.ravel().view(np.uint8)]


def _factors(scales: Words, form: FloatFormat, steps: int) -> Floats:
    """Return the factors that scale each group's largest magnitude to ``steps``; 1 for zeros."""
    largest = form.to_floats(scales)
    return np.divide(
        np.float32(steps), largest, out=np.ones(len(scales), np.float32), where=scales != 0
    )


def _restore(streams: StreamReader, groups: Words, form: FloatFormat, steps: int) -> None:
    """Fill a piece, given as ``[groups, GROUP]``, from its streams."""
    scales = np.empty(len(groups), form.word_type)
    merge([streams.next(len(groups)) for _ in range(form.element_bytes)], scales)
    codes = streams.next(groups.size)
    exact = scales == _exact_mark(scales)
    kept = streams.next(int(np.count_nonzero(exact)) * GROUP * form.element_bytes)
    scales[exact] = 0
    if scales.max() > form.most or codes.max() > 2 * steps:
        raise SerdeError("a scale or a code is out of range")
    values = codes.reshape(groups.shape).astype(np.float32)
    np.subtract(values, np.float32(steps), out=values)
    np.multiply(values, (form.to_floats(scales) / np.float32(steps))[:, np.newaxis], out=values)
    form.from_floats(values, groups)
    groups[exact] = kept.view(form.word_type).reshape(-1, GROUP)


def _exact_mark(scales: Words) -> int:
    """Return the scale that marks an exactly stored group: all bits set, a NaN."""
    return int(np.iinfo(scales.dtype).max)


def _read_header(encoded: memoryview) -> tuple[FloatFormat, int]:
    try:
        code, steps = _CACHEGEN_HEADER.unpack_from(encoded)
    except struct.error:
        raise SerdeError("the header is incomplete") from None
    form = next((each for each in FLOAT_FORMATS.values() if each.code == code), None)
    if form is None or not 1 <= steps <= _MAX_STEPS:
        raise SerdeError(f"the header has format {code} and {steps} steps")
    return form, steps
