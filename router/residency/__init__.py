"""Which replica holds which blocks of KV in which tier.

`PromptKeyring` computes the rolling block hashes of a prompt, as vLLM and the cache engine
compute them, and those of LMCache's chunks; `PrefixIndex` maps them to the sets of replicas
(`slots`) that hold them, told by agents, LMCache and vLLM's KV events (`KvEventReader`). `Match`
is what one replica holds of one prompt. The index keeps at most ``max_keys``: of more, the oldest
of the largest holdings go.

Called by fleet, feeds, staging and lmcache. Imports nothing of the router; no I/O, no clock.
"""

from router.residency.block_hashes import PromptKeyring, PromptKeys, PromptView
from router.residency.claims import Claim
from router.residency.kv_events import (
    BadEventsError,
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    KvBatch,
    KvEvent,
    KvEventReader,
    explains,
    find_shape,
)
from router.residency.lmcache_keys import (
    LMCACHE_HASH,
    LmcacheKeys,
    lmcache_chain,
    lmcache_key64,
)
from router.residency.matches import LOWER_TIERS, ChunkRun, Match
from router.residency.prefix_index import PrefixIndex
from router.residency.replica_sets import Depth, slots
from router.residency.tiers import KeyShape, Tier

__all__ = [
    "LMCACHE_HASH",
    "LOWER_TIERS",
    "BadEventsError",
    "BlocksRemoved",
    "BlocksStored",
    "ChunkRun",
    "Claim",
    "Depth",
    "FirstBlocks",
    "GpuCleared",
    "KeyShape",
    "KvBatch",
    "KvEvent",
    "KvEventReader",
    "LmcacheKeys",
    "Match",
    "PrefixIndex",
    "PromptKeyring",
    "PromptKeys",
    "PromptView",
    "Tier",
    "explains",
    "find_shape",
    "lmcache_chain",
    "lmcache_key64",
    "slots",
]
