"""The tiers below the pool, each behind the same few calls (`base`).

Each kind has a face of its own: `disk` writes one file a chunk; `remote` keeps chunks in a
store (`stores`: Redis, Mooncake, InfiniStore), encoded by a `serde`. This one has what all
tiers share, and loads none of them: a store's client process imports it too. A tier that
fails is left alone for a while (`TierBackoff`), and the engine goes on without it.

Called by engine, connector, residency, settings and simulator. Imports keys and values.
"""

from cacheengine.tiers.base import (
    LONGEST_BACKOFF_S,
    Chunk,
    GetOutcome,
    LocalTier,
    NullTier,
    PutOutcome,
    SharedTier,
    Tier,
    TierBackoff,
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
    "TierBackoff",
]
