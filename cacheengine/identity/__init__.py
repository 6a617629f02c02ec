"""The identity of KV: which layout, weights and adapters a chunk belongs to."""

from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.identity.kv_versions import (
    UNCACHED,
    KvVersion,
    KvVersions,
    LoraAdapter,
    WeightFiles,
)

__all__ = ["UNCACHED", "ChunkLayout", "KvVersion", "KvVersions", "LoraAdapter", "WeightFiles"]
