"""Every decision of the engine: which chunk is where, which may be used, what moves next.

`Residency` is asked by the engine and answers with a `Todo`. `pool_index` has the pool's
entries with their eviction (`POLICY_NAMES`), `TierIndex` a local tier's, `RemoteIndex` what
a shared store is believed to hold; `cascade` writes chunks down, `promotions` brings them
up; `state` is what these have in common.

Called by engine and agent. Imports record and tiers (outcomes); no I/O, no clock, no threads.
"""

from cacheengine.residency.deciding import Residency, make_residency
from cacheengine.residency.decisions import Presence, StoreReservation, Todo
from cacheengine.residency.eviction import POLICY_NAMES
from cacheengine.residency.local_index import TierIndex
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import Entry, count_held
from cacheengine.residency.promotion import Promotion
from cacheengine.residency.shared_index import RemoteIndex

__all__ = [
    "POLICY_NAMES",
    "Entry",
    "LowerIndex",
    "Presence",
    "Promotion",
    "RemoteIndex",
    "Residency",
    "StoreReservation",
    "TierIndex",
    "Todo",
    "count_held",
    "make_residency",
]
