"""The contracts of the tiers below the CPU pool.

A tier moves bytes and nothing else. What it holds, in which order it is
evicted and how full it may get is decided by the engine, which never has two
operations on one key of one tier under way, except several reads.

A tier never raises for what can go wrong outside of it; a failed tier is a
miss. It is called from several threads at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final

from warmroute_common.agent_protocol import TierName

Chunk = tuple[bytes, memoryview]
"""A chunk's key and its bytes in the pool: read by a put, filled by a get."""


class PutOutcome(Enum):
    """How a put ended."""

    STORED = auto()
    """A get now gives exactly these bytes."""
    NO_SPACE = auto()
    """Nothing was kept; there is no room below the tier's own capacity either."""
    FAILED = auto()
    """Nothing was kept, for another reason."""
    NOT_TRIED = auto()
    """Nothing was kept: the tier's server has failed lately, and is left alone for now."""


class GetOutcome(Enum):
    """How a get ended. The buffer holds the chunk only after OK."""

    OK = auto()
    MISSING = auto()
    DAMAGED = auto()
    """There were bytes, provably not those stored; they have been removed."""
    FAILED = auto()
    """The tier could not be read; what it holds was left alone."""


class Tier(ABC):
    """Chunks by key, all of one size, behind blocking calls."""

    name: TierName
    batch_chunks: int = 1
    """How many chunks one call of `get_many` or `put_many` should have at most."""

    @abstractmethod
    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store chunks, each all or nothing: a reader sees it whole or not at all.

        Replaces what a key had, or keeps it where the server's objects never
        change: a key stands for its bytes. They must not change meanwhile.
        """

    @abstractmethod
    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Fill buffers with chunks; the content of one is undefined unless OK."""

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Store one chunk."""
        return self.put_many([(key, payload)])[0]

    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        """Read one chunk."""
        return self.get_many([(key, into)])[0]

    @abstractmethod
    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks; absent ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the tier holds open; stored chunks stay. Idempotent."""


class LocalTier(Tier):
    """A tier that belongs to this engine alone: nothing comes or goes but by its calls."""

    capacity_bytes: int
    """How much may be taken; 0 means the tier holds nothing."""
    item_bytes: int
    """What one chunk takes of the capacity, headers included."""

    @abstractmethod
    def scan(self) -> list[bytes]:
        """Return the keys held from an earlier life, least recently used first.

        Called once, before anything else. Removes what is incomplete.
        """


class SharedTier(Tier):
    """A tier that other engines fill, too, and whose server evicts as it likes.

    What it holds is known only by asking, and only for the moment.
    """

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Say for each key whether the tier holds it now; None: it cannot be asked."""


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


FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 60.0


class TierBackoff:
    """A pause for a tier, or for one chunk of it, after each failure.

    Twice as long after each further one in a row, unless the tier has a breaker of its own:
    two that grow, one behind the other, would not see for long that a server is well again.
    """

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S
        self._until_s = float("-inf")

    def is_on(self, now_s: float) -> bool:
        """Whether the tier, or the chunk, is to be left alone."""
        return now_s < self._until_s

    def failed(self, now_s: float, *, grows: bool = True) -> None:
        """Begin a pause, unless one is on: then another operation of the same moment failed."""
        if self.is_on(now_s):
            return
        self._until_s = now_s + (self._next_s if grows else FIRST_BACKOFF_S)
        if grows:
            self._next_s = min(2 * self._next_s, LONGEST_BACKOFF_S)

    def succeeded(self) -> None:
        """Make the next pause a short one. Does not end one that is on."""
        self._next_s = FIRST_BACKOFF_S
