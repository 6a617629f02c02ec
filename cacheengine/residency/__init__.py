"""Every decision of the engine: which chunk is where, which may be used, what moves next.

`Decider` is asked by the engine and answers with a `Todo`. `CpuIndex` has the pool's entries
with their eviction (`POLICY_NAMES`), `TierIndex` a local tier's, `RemoteIndex` what a shared
store is believed to hold; `stores` and `cascade` bring chunks down from the GPU, `walks` and
`promoter` up from below; all work on one `CacheState`.

Called by engine, agent and simulator. Imports record and tiers (outcomes); no I/O, no clock,
no threads.
"""

from cacheengine.residency.decider import Decider
from cacheengine.residency.decisions import (
    PORTION,
    Presence,
    Promotion,
    StoreReservation,
    Todo,
)
from cacheengine.residency.entry import Entry, Holder, count_held
from cacheengine.residency.eviction import POLICY_NAMES
from cacheengine.residency.lower import LowerIndex, RemoteIndex, TierIndex
from cacheengine.residency.shards import SHARDS

__all__ = [
    "POLICY_NAMES",
    "PORTION",
    "SHARDS",
    "Decider",
    "Entry",
    "Holder",
    "LowerIndex",
    "Presence",
    "Promotion",
    "RemoteIndex",
    "StoreReservation",
    "TierIndex",
    "Todo",
    "count_held",
]
