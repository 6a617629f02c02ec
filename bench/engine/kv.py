"""KV to measure with: what a replica left on disk, and what is made up here.

The made-up sort has what trained models' KV is known for and a model of random
weights lacks: channels with a mean of their own, a few of them far larger than
the rest, sizes that differ from channel to channel, rotary positions, and
neighbouring tokens that resemble each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.ttft import BenchError
from cacheengine.tiers.base import GetOutcome, PutOutcome
from cacheengine.tiers.disk.disk import DiskTier

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """The geometry of a chunk: ``[layers, 2, tokens, heads, head_dim]``."""

    layers: int = 8
    tokens: int = 256
    heads: int = 8
    head_dim: int = 128


OUTLIER_CHANNELS = 4
"""Of each head's keys."""
OUTLIER_SIZE = 12.0
"""Mean of an outlier channel, in typical standard deviations; the sign is random."""
MEAN_SIZE = 0.5
"""Standard deviation of the other channels' means, in each one's own."""
SPREAD = 0.5
"""Standard deviation of the logarithm of the channels' sizes."""
KEY_CORRELATION, VALUE_CORRELATION = 0.7, 0.4
"""Of neighbouring tokens in one channel."""
_ROPE_BASE = 10_000.0


def structured_kv(shape: KvShape, *, seed: int) -> Floats:
    """Return a chunk of made-up KV with the structure that this module tells of."""
    generator = np.random.default_rng(seed)
    layers = [
        np.stack([_keys(generator, shape), _values(generator, shape)]) for _ in range(shape.layers)
    ]
    return np.stack(layers).astype(np.float32)


def gaussian_kv(shape: KvShape, *, seed: int) -> Floats:
    """Return a chunk of independent normal numbers."""
    size = (shape.layers, 2, shape.tokens, shape.heads, shape.head_dim)
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def _keys(generator: np.random.Generator, shape: KvShape) -> npt.NDArray[np.float64]:
    channels = (shape.heads, shape.head_dim)
    means = generator.standard_normal(channels) * MEAN_SIZE
    for head in means:
        # The slowly turning half of the channels is where models keep them.
        which = generator.choice(shape.head_dim // 2, OUTLIER_CHANNELS, replace=False)
        head[shape.head_dim // 2 + which] = OUTLIER_SIZE * generator.choice([-1, 1], which.size)
    return _rotated(_channels(generator, shape, means, KEY_CORRELATION))


def _values(generator: np.random.Generator, shape: KvShape) -> npt.NDArray[np.float64]:
    means = generator.standard_normal((shape.heads, shape.head_dim)) * MEAN_SIZE
    return _channels(generator, shape, means, VALUE_CORRELATION)


def _channels(
    generator: np.random.Generator,
    shape: KvShape,
    means: npt.NDArray[np.float64],
    correlation: float,
) -> npt.NDArray[np.float64]:
    """Return ``[tokens, heads, head_dim]``: in each channel an autoregressive process."""
    steps = generator.standard_normal((shape.tokens, *means.shape))
    for token in range(1, shape.tokens):
        steps[token] *= np.sqrt(1 - correlation**2)
        steps[token] += correlation * steps[token - 1]
    sizes = np.exp(SPREAD * generator.standard_normal(means.shape))
    scaled: npt.NDArray[np.float64] = (steps + means) * sizes
    return scaled


def _rotated(keys: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Apply rotary positions: channels turn in neighbouring pairs, the later the slower."""
    tokens, _, head_dim = keys.shape
    half = head_dim // 2
    speeds = _ROPE_BASE ** (-np.arange(half) / half)
    angles = np.arange(tokens)[:, np.newaxis, np.newaxis] * speeds
    first, second = keys[..., 0::2], keys[..., 1::2]
    turned = np.empty_like(keys)
    turned[..., 0::2] = first * np.cos(angles) - second * np.sin(angles)
    turned[..., 1::2] = first * np.sin(angles) + second * np.cos(angles)
    return turned


def as_bfloat16(numbers: Floats) -> bytes:
    """Return numbers rounded to bfloat16, little-endian."""
    bits = numbers.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2").tobytes()


def as_float16(numbers: Floats) -> bytes:
    """Return numbers rounded to float16, little-endian."""
    return numbers.astype("<f2").tobytes()


class StoredChunks:
    """The chunks in the directory of a disk tier whose replica has ended."""

    def __init__(self, root: Path, chunk_bytes: int) -> None:
        """Raises `BenchError` when there is not exactly one layout's directory, with chunks."""
        self._root = root
        self._chunk_bytes = chunk_bytes
        layouts = [each for each in root.iterdir() if each.is_dir() and any(each.rglob("*.kv"))]
        if len(layouts) != 1:
            raise BenchError(f"{root} holds the chunks of {len(layouts)} layouts, not of one")
        self._fingerprint = layouts[0].name

    def read(self) -> dict[bytes, bytes]:
        """Return every chunk by its key."""
        chunks = {}
        with self._open() as tier:
            for key in tier.scan():
                buffer = bytearray(self._chunk_bytes)
                if tier.get(key, memoryview(buffer)) is not GetOutcome.OK:
                    raise BenchError(f"the chunk {key.hex()} cannot be read")
                chunks[key] = bytes(buffer)
        return chunks

    def rewrite(self, chunks: dict[bytes, bytes]) -> None:
        """Put these chunks in place of those of the same keys."""
        with self._open() as tier:
            tier.scan()
            for key, content in chunks.items():
                if tier.put(key, memoryview(content)) is not PutOutcome.STORED:
                    raise BenchError(f"the chunk {key.hex()} cannot be written")

    @contextmanager
    def _open(self) -> Iterator[DiskTier]:
        tier = DiskTier([self._root], self._fingerprint, self._chunk_bytes, 1 << 40)
        try:
            yield tier
        finally:
            tier.close()
