"""Numbers as byte planes: the first bytes of all of them, then the second bytes, and so on.

In floating-point numbers the high bytes (sign and exponent) are alike and the
low ones are noise, so that coding them apart pays.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cacheengine.tiers.serde.streams import Plane

Words = npt.NDArray[np.unsignedinteger[Any]]

PIECE_BYTES: Final = 4 << 20
"""Bytes handled at once: what is made on the way then stays in the processor's
cache and is small. A multiple of every element size; part of the format."""

WORD_TYPES: Final[Mapping[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}
"""Types by the bytes of an element."""


def pieces(words: Words) -> Iterator[Words]:
    """Yield the parts of ``words`` that are handled at once, as views."""
    step = PIECE_BYTES // words.itemsize
    for start in range(0, len(words), step):
        yield words[start : start + step]


def piece_count(payload_bytes: int) -> int:
    """Return how many pieces a payload has."""
    return -(-payload_bytes // PIECE_BYTES)


def split(words: Words) -> list[Plane]:
    """Return the planes, lowest bytes first."""
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
