"""The number formats of KV that can be quantized, by their bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cacheengine.tiers.serde.planes import WORD_TYPES, Words

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class FloatFormat:
    """One format, its numbers given as words of their bits."""

    code: int
    element_bytes: int
    magnitude: int
    """Mask of all bits but the sign. What it leaves of two numbers compares as they do."""
    least: int
    """Magnitude of the smallest number that quantizing may meet as a group's largest."""
    most: int
    """Of the largest: below infinity, and so that no product overflows."""
    rounding: float
    """Largest relative error of rounding a number to this format."""
    numpy_type: type[np.floating[Any]] | None
    """None for bfloat16, which numpy does not know: it is the upper half of a float32."""

    @property
    def word_type(self) -> "np.dtype[np.unsignedinteger[Any]]":
        """Return the type of the words."""
        return WORD_TYPES[self.element_bytes]

    def to_floats(self, words: Words) -> Floats:
        """Return the numbers; those of float32 in place."""
        if self.numpy_type is not None:
            return words.view(self.numpy_type).astype(np.float32, copy=False)
        wide = words.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)

    def from_floats(self, floats: Floats, into: Words) -> None:
        """Round into the words; may use the floats up."""
        if self.numpy_type is not None:
            np.copyto(into.view(self.numpy_type), floats, casting="same_kind")
            return
        bits = floats.view(np.uint32)
        # To the nearest; of two equally near ones the larger.
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
        # The smallest that is not denormal: below it rounding is no longer relative.
        least=1 << 10,  # 2**-14
        most=0x7BFF,  # 65504, the largest of all
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
"""By vLLM's names of them."""
