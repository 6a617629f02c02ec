"""What a chunk's bytes mean, and the fingerprint of that."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

_FORMAT: Final = 2
"""Raised when the bytes of a chunk change their meaning for equal layouts."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """What a chunk's bytes mean: the model whose KV they are, and their order.

    Two engines may exchange chunks exactly when their layouts are equal. The disk tier keeps each
    layout in its own directory, named by `fingerprint`.
    """

    model: str
    """vLLM's ``--model``: a path, or a name on a hub."""
    dtype: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    """Bytes of one chunk: one row of the pool, with all layers and ranks."""
    parallel: str = ""
    """How ranks share a row: tensor, pipeline and context parallel sizes."""
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    kv_layout: str = ""
    """vLLM's name for the order of a page's bytes, and the platform."""
    weights: str = ""
    """The weights that were loaded: a hub's revision or a digest of files. A model that is
    replaced in place therefore does not find its predecessor's KV."""
    model_options: str = ""
    """Digest of the parts of vLLM's configuration that change the model's KV."""
    build: str = ""
    """Versions of the software that computes the KV, and the kind of device."""
    attention: str = ""
    """vLLM's attention backend."""
    pages: str = ""
    """The geometry of vLLM's KV cache: for each group of layers, the content of a page."""
    lossy: str = ""
    """Name of the remote tier's serde if it is lossy: its chunks must never be taken for exact
    ones, on disk or by a peer."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "chunk_tokens", "chunk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_size is {self.chunk_tokens} tokens, not a multiple of vLLM's block "
                f"size of {self.block_tokens}; set chunk_size to a multiple of it"
            )

    def fingerprint(self) -> str:
        """Return 32 hex digits that are equal exactly for equal layouts."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
