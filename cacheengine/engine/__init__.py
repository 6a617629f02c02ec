"""The cache engine: slots of a pool, the tiers below it, and the threads that move chunks."""

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.engine_metrics import render_metrics
from cacheengine.engine.promotion_waits import Promotes, PromotionWaits
from cacheengine.engine.tier_io import IoThreads, JobRunner, make_tier

__all__ = [
    "CacheEngine",
    "IoThreads",
    "JobRunner",
    "Promotes",
    "PromotionWaits",
    "make_tier",
    "render_metrics",
]
