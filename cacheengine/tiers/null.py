"""The tier that holds nothing: what stands below the pool when no other tier does."""

from collections.abc import Iterable, Sequence

from cacheengine.tiers.base import Chunk, GetOutcome, LocalTier, PutOutcome


class NullTier(LocalTier):
    """Refuses every put and misses every get."""

    name = "disk"
    capacity_bytes = 0
    item_bytes = 1

    def scan(self) -> list[bytes]:
        """Return no keys."""
        return []

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Refuse."""
        return [PutOutcome.NO_SPACE] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Miss."""
        return [GetOutcome.MISSING] * len(chunks)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
