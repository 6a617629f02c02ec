"""The tiers below the CPU pool: `disk`, and `remote` on a server (`store`)."""

from cacheengine.tiers.tier import (
    LONGEST_BACKOFF_S,
    Chunk,
    GetOutcome,
    LocalTier,
    NullTier,
    PutOutcome,
    SharedTier,
    Tier,
    tier_backoff,
)

__all__ = [
    "LONGEST_BACKOFF_S",
    "Chunk",
    "GetOutcome",
    "LocalTier",
    "NullTier",
    "PutOutcome",
    "SharedTier",
    "Tier",
    "tier_backoff",
]
