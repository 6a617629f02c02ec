"""Which replica holds which blocks of KV in which tier.

`PromptKeyCache` computes the rolling block hashes of a prompt, as vLLM and the cache engine
compute them, and those of LMCache's chunks; `PrefixIndex` maps them to the sets of replicas
(`slots`) that hold them, told by agents, LMCache and vLLM's KV events (`KvEventReader`). `Match`
is what one replica holds of one prompt. The index keeps at most ``max_keys``: of more, the oldest
of the largest holdings go.

Called by fleet, feeds, staging and lmcache. Imports nothing of the router; no I/O, no clock.
"""

from router.index.holders import Depth, slots
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    KvBatch,
    KvEvent,
    KvEventFormatError,
    KvEventReader,
    explains,
    find_shape,
)
from router.index.lmcache_keys import (
    LMCACHE_HASH,
    LmcacheKeys,
    lmcache_chain,
    lmcache_key64,
)
from router.index.prefix_index import PrefixIndex, SpeculativeEntry
from router.index.prompt_keys import (
    LOWER_TIERS,
    ChunkRun,
    KeyShape,
    Match,
    PromptKeyCache,
    PromptKeys,
    PromptView,
    Tier,
)

__all__ = [
    "LMCACHE_HASH",
    "LOWER_TIERS",
    "BlocksRemoved",
    "BlocksStored",
    "ChunkRun",
    "Depth",
    "FirstBlocks",
    "GpuCleared",
    "KeyShape",
    "KvBatch",
    "KvEvent",
    "KvEventFormatError",
    "KvEventReader",
    "LmcacheKeys",
    "Match",
    "PrefixIndex",
    "PromptKeyCache",
    "PromptKeys",
    "PromptView",
    "SpeculativeEntry",
    "Tier",
    "explains",
    "find_shape",
    "lmcache_chain",
    "lmcache_key64",
    "slots",
]
