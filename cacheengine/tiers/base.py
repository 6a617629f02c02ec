"""The contract of a tier below the CPU pool.

A tier moves bytes and nothing else. What it holds, in which order it is
evicted and how full it may get is decided by the engine (`tier_index`), which
never has two operations on one key under way, except several `get`.

A tier never raises for what can go wrong outside of it; a failed tier is a
miss. It is called from several threads at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum, auto

from cacheengine.wire import TierName


class PutOutcome(Enum):
    """How a `Tier.put` ended."""

    STORED = auto()
    """A `get` now gives exactly these bytes."""
    NO_SPACE = auto()
    """Nothing was kept; there is no room below the tier's own capacity either."""
    FAILED = auto()
    """Nothing was kept, for another reason."""


class GetOutcome(Enum):
    """How a `Tier.get` ended. The buffer holds the chunk only after OK."""

    OK = auto()
    MISSING = auto()
    DAMAGED = auto()
    """There were bytes, provably not those stored; they have been removed."""
    FAILED = auto()
    """The tier could not be read; what it holds was left alone."""


class Tier(ABC):
    """Chunks by key, all of one size, behind blocking calls."""

    name: TierName
    capacity_bytes: int
    """How much may be taken; 0 means the tier holds nothing."""
    item_bytes: int
    """What one chunk takes of the capacity, headers included."""

    @abstractmethod
    def scan(self) -> list[bytes]:
        """Return the keys held from an earlier life, least recently used first.

        Called once, before anything else. Removes what is incomplete.
        """

    @abstractmethod
    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Store a chunk, all or nothing: a reader sees it whole or not at all.

        Replaces what the key had. ``payload`` must not change meanwhile.
        """

    @abstractmethod
    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        """Fill ``into`` with the chunk; its content is undefined unless OK."""

    @abstractmethod
    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks; those that are not there are no error."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the tier holds open; stored chunks stay. Idempotent."""
