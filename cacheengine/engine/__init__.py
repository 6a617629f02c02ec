"""The cache engine: slots of a pool, the tiers below it, and the threads that move chunks.

`CacheEngine` is one lock around `cacheengine.residency` and the clock beside it;
`lower_tiers` has the tiers that the settings name (`configured_tiers`) and the I/O that moves
bytes between them and the pool (`tier_io`). `Waits` goes between it and a scheduler.

Called by connector, agent, transfer and simulator. Imports settings, residency, tiers, memory,
identity and record; knows nothing of vLLM.
"""

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.io_threads import IoThreads, JobRunner
from cacheengine.engine.lower_tiers import make_tier
from cacheengine.engine.metrics import render_metrics
from cacheengine.engine.waits import Promotes, Waits

__all__ = [
    "CacheEngine",
    "IoThreads",
    "JobRunner",
    "Promotes",
    "Waits",
    "make_tier",
    "render_metrics",
]
