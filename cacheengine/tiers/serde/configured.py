"""Which serde the configuration names.

Those that encode load numpy only when they are made: an engine without a remote tier, as a
simulated replica's, needs none.
"""

from collections.abc import Callable, Mapping
from typing import Final

from cacheengine.tiers.serde.base import NaiveSerde, Serde


def make_serde(name: str, dtype: str) -> Serde:
    """Return the serde of this name (``remote_serde``) for KV of this type.

    ``dtype`` is vLLM's name of the KV cache's type (`ChunkLayout.dtype`), such
    as "bfloat16" or "fp8_e4m3". Raises ValueError, in words for the operator,
    for a name that no serde has, and for KV that it cannot encode.
    """
    if name not in _SERDES:
        raise ValueError(f'"{name}" is none of {", ".join(_SERDES)}')
    return _SERDES[name](dtype)


def lossy_name(name: str, dtype: str) -> str:
    """Return the name of a serde that changes KV, "" for an exact one; ValueError as above."""
    return "" if make_serde(name, dtype).is_exact else name


# The other types (fp8, and what packs numbers with their scales) have elements of a byte.
_ELEMENT_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}


def _lossless(dtype: str) -> Serde:
    from cacheengine.tiers.serde.lossless import LosslessSerde  # noqa: PLC0415  (loads numpy)

    return LosslessSerde(_ELEMENT_BYTES.get(dtype, 1))


def _cachegen(dtype: str) -> Serde:
    from cacheengine.tiers.serde.cachegen import CacheGenSerde  # noqa: PLC0415  (loads numpy)

    return CacheGenSerde(dtype)


_SERDES: Final[Mapping[str, Callable[[str], Serde]]] = {
    "naive": lambda _: NaiveSerde(),
    "lossless": _lossless,
    "cachegen": _cachegen,
}

SERDE_NAMES: Final = tuple(_SERDES)
"""The names, the default first."""
