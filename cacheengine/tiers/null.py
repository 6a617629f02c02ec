"""The tier that holds nothing: what stands below the pool when no other tier does."""

from collections.abc import Iterable

from cacheengine.tiers.base import GetOutcome, PutOutcome, Tier


class NullTier(Tier):
    """Refuses every put and misses every get."""

    name = "disk"
    capacity_bytes = 0
    item_bytes = 1

    def scan(self) -> list[bytes]:
        """Return no keys."""
        return []

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Refuse."""
        return PutOutcome.NO_SPACE

    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        """Miss."""
        return GetOutcome.MISSING

    def delete(self, keys: Iterable[bytes]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
