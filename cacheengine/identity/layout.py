"""The meaning of a chunk's bytes, and its fingerprint."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

_FORMAT: Final = 2
"""Raised when the bytes of a chunk change their meaning for equal layouts."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """The meaning of a chunk's bytes: the model they are KV of, and their order.

    Two engines may exchange chunks exactly when their layouts are equal; the
    disk tier keeps each layout in a directory of its own, named `fingerprint`.
    """

    model: str
    """vLLM's ``--model``: a path, or a name on a hub."""
    dtype: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    """Payload of one chunk: one row of the pool, all layers and ranks."""
    parallel: str = ""
    """How ranks share a row (tensor, pipeline, context parallel sizes)."""
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    kv_layout: str = ""
    """vLLM's name for the order of a page's bytes, and the platform."""
    weights: str = ""
    """Which weights ``model`` stood for when they were loaded: a hub's revision or a digest
    of files, so that a model replaced in place does not meet its predecessor's KV."""
    model_options: str = ""
    """Digest of vLLM's configuration as far as it changes the model's KV."""
    build: str = ""
    """Versions of what computed the KV, and the kind of device."""
    attention: str = ""
    """vLLM's attention backend."""
    pages: str = ""
    """The geometry of vLLM's KV cache: for each group of layers, what a page of it holds."""
    lossy: str = ""
    """Name of the remote tier's serde if it is not exact: chunks that come back
    through it must never be taken, from disk or by a peer, for exact ones."""

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
        """Return 32 hex digits, equal for equal layouts only."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
