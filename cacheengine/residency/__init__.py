"""Which chunk is in which tier, which may be used, and what moves next. Pure: no I/O, no clock."""

from cacheengine.residency.decider import Decider
from cacheengine.residency.decisions import (
    PORTION,
    PendingWork,
    Presence,
    Promotion,
    StoreReservation,
)
from cacheengine.residency.eviction_policies import DEFAULT_POLICY, POLICY_NAMES
from cacheengine.residency.local_index import LocalIndex
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import Holder, PoolEntry
from cacheengine.residency.shared_index import SharedIndex
from cacheengine.residency.state import SHARDS

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "PORTION",
    "SHARDS",
    "Decider",
    "Holder",
    "LocalIndex",
    "LowerIndex",
    "PendingWork",
    "PoolEntry",
    "Presence",
    "Promotion",
    "SharedIndex",
    "StoreReservation",
]
