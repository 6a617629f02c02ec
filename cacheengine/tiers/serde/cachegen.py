"""Lossy compression of KV, after CacheGen: quantized groups, entropy coded.

Asked for by name, never chosen by itself: answers from KV that has been
through it differ from those without a cache.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from cacheengine.tiers.serde.base import Part, Serde, SerdeError
from cacheengine.tiers.serde.floats import FLOAT_FORMATS, FloatFormat, Floats
from cacheengine.tiers.serde.planes import Words, merge, piece_count, pieces, split
from cacheengine.tiers.serde.streams import Plane, StreamReader, assemble, shrink, stored_as_is

GROUP: Final = 64
"""Consecutive elements with a scale of their own: in every layout of vLLM's
those of one token and head, or a part of them, where heads have a multiple of
64 elements. A divisor of a piece's elements; part of the format."""

DEFAULT_STEPS: Final = 31
"""Between 127, whose error is about twice that of bfloat16 itself, and 7, which is 4 bits."""
_MAX_STEPS: Final = 127
_HEADER: Final = struct.Struct("<BB")
_PRODUCT_ERROR: Final = 2.0**-20
"""More than the float32 arithmetic on the way adds."""


class CacheGenSerde(Serde):
    """Every element becomes a multiple of a ``steps``-th of its group's largest magnitude.

    The error of an element, and so the root mean square of a group's errors,
    is at most `max_error` times the largest magnitude in its group. Groups in
    which that cannot be kept (infinities, NaN, magnitudes near the ends of the
    format) are stored exactly, as are elements after the last whole group.
    The sign of a zero is lost.

    A piece has these streams: the planes of the groups' scales, one byte an
    element, the exact groups. The scale of an exact group has all bits set.
    Not compatible with LMCache's own streams of this name.
    """

    name = "cachegen"
    code = 2
    is_exact = False

    def __init__(self, dtype: str, steps: int = DEFAULT_STEPS) -> None:
        """``steps`` to each side of zero: 1 to 127. Raises ValueError for other KV than floats."""
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
        """Return the bound of an element's error, as a share of its group's largest magnitude."""
        return 0.5 / self._steps + self._format.rounding + _PRODUCT_ERROR

    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return a header and the coded streams, or one byte and the payload."""
        whole_bytes = _whole_bytes(len(payload), self._format)
        words = np.frombuffer(payload[:whole_bytes], self._format.word_type)
        streams: list[Part] = []
        for piece in pieces(words):
            streams += map(shrink, _quantize(piece.reshape(-1, GROUP), self._format, self._steps))
        header = _HEADER.pack(self._format.code, self._steps)
        return assemble(header, [*streams, payload[whole_bytes:]], payload)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Fill ``into`` with what differs from the payload by the error that was chosen."""
        if stored_as_is(encoded, into):
            return
        form, steps = _read_header(encoded)
        whole_bytes = _whole_bytes(len(into), form)
        words = np.frombuffer(into[:whole_bytes], form.word_type)
        count = piece_count(whole_bytes) * (form.element_bytes + 2) + 1
        streams = StreamReader(encoded, _HEADER.size, count)
        for piece in pieces(words):
            _restore(streams, piece.reshape(-1, GROUP), form, steps)
        into[whole_bytes:] = streams.next(len(into) - whole_bytes).data


def _whole_bytes(payload_bytes: int, form: FloatFormat) -> int:
    """Return how many bytes the whole groups of a payload have."""
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
    # To the nearest, since converting drops the fraction.
    np.add(values, np.float32(steps + 0.5), out=values)
    codes = values.astype(np.uint8).ravel()
    scales[exact] = _exact_mark(scales)
    return [*split(scales), codes, kept.ravel().view(np.uint8)]


def _factors(scales: Words, form: FloatFormat, steps: int) -> Floats:
    """Return what makes a group's largest magnitude ``steps``; 1 where all is zero."""
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
        raise SerdeError("a scale or a code that quantizing does not give")
    values = codes.reshape(groups.shape).astype(np.float32)
    np.subtract(values, np.float32(steps), out=values)
    np.multiply(values, (form.to_floats(scales) / np.float32(steps))[:, np.newaxis], out=values)
    form.from_floats(values, groups)
    groups[exact] = kept.view(form.word_type).reshape(-1, GROUP)


def _exact_mark(scales: Words) -> int:
    """Return the scale that says a group is stored exactly: all bits set, a NaN."""
    return int(np.iinfo(scales.dtype).max)


def _read_header(encoded: memoryview) -> tuple[FloatFormat, int]:
    try:
        code, steps = _HEADER.unpack_from(encoded)
    except struct.error:
        raise SerdeError("the header is not whole") from None
    form = next((each for each in FLOAT_FORMATS.values() if each.code == code), None)
    if form is None or not 1 <= steps <= _MAX_STEPS:
        raise SerdeError(f"a header of format {code} and {steps} steps")
    return form, steps
