"""In which order chunks leave when room is needed.

`make_policy` gives one by its name (`POLICY_NAMES`); `EvictionPolicy` says what it does.

Called by residency and bench. Imports nothing of the project.
"""

from collections.abc import Callable
from typing import Final

from cacheengine.residency.eviction.arc import Arc
from cacheengine.residency.eviction.base import EvictionPolicy
from cacheengine.residency.eviction.policies import Fifo, Lfu, Lru, Mru

__all__ = [
    "Arc",
    "Callable",
    "EvictionPolicy",
    "Fifo",
    "Final",
    "Lfu",
    "Lru",
    "Mru",
    "make_policy",
]

_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "LRU": lambda _: Lru(),
    "LFU": lambda _: Lfu(),
    "FIFO": lambda _: Fifo(),
    "MRU": lambda _: Mru(),
    "ARC": Arc,
}

POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Return an empty policy by its name in LMCache's ``cache_policy``, for so many keys."""
    return _POLICIES[name.upper()](capacity)
