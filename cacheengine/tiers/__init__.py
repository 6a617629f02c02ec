"""The tiers below the pool, each behind the same few calls (`base`).

Each kind has a face of its own: `disk` writes one file a chunk; `remote` keeps chunks in a
store (`stores`: Redis, Mooncake, InfiniStore), encoded by a `serde`. This one has what all
tiers share, and loads none of them: a store's client process imports it too. A tier that
fails rests (`Rest`), and the engine goes on without it.

Called by engine, connector, residency and settings. Imports keys and values.
"""

from cacheengine.tiers.base import GetOutcome, LocalTier, PutOutcome, SharedTier, Tier
from cacheengine.tiers.null import NullTier
from cacheengine.tiers.rest import LONGEST_REST_S, Rest

__all__ = [
    "LONGEST_REST_S",
    "GetOutcome",
    "LocalTier",
    "NullTier",
    "PutOutcome",
    "Rest",
    "SharedTier",
    "Tier",
]
