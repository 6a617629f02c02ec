"""Operators' pins: chunks that stay in a tier until they are unpinned or cleared. Pure."""

from collections.abc import Sequence

from cacheengine.record import CPU
from cacheengine.residency.entry import Entry
from cacheengine.residency.state import CacheState


class OperatorPins:
    """Pins of prefixes in the pool and on disk; a shared tier keeps what it likes.

    Distinct from the pins of promotions, which end with the chunk's use.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier holds, as far as is known."""
        index = self._state.lower_named(tier)
        for count, key in enumerate(keys):
            is_held = (
                self._state.cpu.ready(key) is not None
                if tier == CPU
                else index is not None and key in index
            )
            if not is_held:
                return count
        return len(keys)

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Pin leading chunks that a tier holds; return how many, fewer where too much is pinned."""
        index = self._state.lower_named(tier)
        held = self.held_in(keys, tier)
        for count, key in enumerate(keys[:held]):
            is_pinned = (
                self._state.cpu.operator_pin(self._ready(key))
                if tier == CPU
                else index is not None and index.operator_pin(key)
            )
            if not is_pinned:
                return count
        return held

    def unpin(self, keys: Sequence[bytes], tier: str, now_s: float) -> int:
        """End the pins of leading chunks that a tier holds; return how many had one."""
        index = self._state.lower_named(tier)
        unpinned = 0
        for key in keys[: self.held_in(keys, tier)]:
            if tier == CPU:
                entry = self._ready(key)
                unpinned += self._state.cpu.operator_unpin(entry)
                self._state.drop_if_unwanted(entry, now_s)
            elif index is not None:
                unpinned += index.operator_unpin(key)
        return unpinned

    def _ready(self, key: bytes) -> Entry:
        entry = self._state.cpu.ready(key)
        assert entry is not None, "held and not ready"
        return entry
