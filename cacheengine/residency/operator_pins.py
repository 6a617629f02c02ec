"""Operators' pins: chunks that stay in a tier until they are unpinned or cleared. Pure."""

from collections.abc import Sequence

from cacheengine.record import CPU
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import CpuIndex
from cacheengine.residency.state import CacheState


class OperatorPins:
    """Pins of prefixes in the pool and on disk; a shared tier keeps what it likes.

    Distinct from the pins of promotions, which end with the chunk's use.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def _index(self, tier: str) -> CpuIndex | LowerIndex | None:
        return self._state.cpu if tier == CPU else self._state.lower_named(tier)

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier is known to hold."""
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index:
                return count
        return len(keys)

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Pin leading chunks that a tier holds; return how many, fewer where too much is pinned."""
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index or not index.operator_pin(key):
                return count
        return len(keys)

    def unpin(self, keys: Sequence[bytes], tier: str, now_s: float) -> int:
        """End the pins of leading chunks that a tier holds; return how many had one."""
        index = self._index(tier)
        if index is None:
            return 0
        held = keys[: self.held_in(keys, tier)]
        unpinned = sum(map(index.operator_unpin, held))
        if tier == CPU:
            for key in held:
                entry = self._state.cpu.ready(key)
                if entry is not None:
                    self._state.drop_if_unwanted(entry, now_s)
        return unpinned
