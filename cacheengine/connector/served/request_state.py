"""What the manager remembers of a request."""

from dataclasses import dataclass, field

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cacheengine.residency import Promotion


@dataclass(slots=True)
class RequestState:
    """What is remembered of a request from its first lookup to its end."""

    req_id: str
    wanted: dict[bytes, CacheHitSource] = field(default_factory=dict)
    """Chunks below the pool that this step's lookups found, in their order."""
    last_position: int = 0
    """Where in the request the last of those is."""
    looks_back: bool = False
    """It is looked up from its end: all layers have a window."""
    promotions: dict[bytes, tuple[Promotion, CacheHitSource]] = field(default_factory=dict)
    """What was promoted for it, and where from. Each chunk once: a request
    does not wait again for one that did not come, or did not stay."""
    used: set[bytes] = field(default_factory=set)
    """Chunks whose use was noted."""
