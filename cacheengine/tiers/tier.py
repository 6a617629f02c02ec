"""The contract of a tier below the CPU pool.

A tier moves bytes. The engine decides what a tier holds, how full it is and what leaves it.

Who calls what, and when (guaranteed by the engine):

1. `LocalTier.scan` is called once, before any other call, by the thread that starts the engine.
2. `Tier.put_many`, `Tier.get_many`, `Tier.delete` and `SharedTier.find` are called by the
   engine's I/O threads, several at once. They block. `SharedTier.purge` is called by any thread.
3. At most one operation on a key of a tier runs at a time, except several gets, and `purge`.
4. `LocalTier.save` is called by one of these threads, and at last by the thread that closes the
   engine, when they have ended. Calls for one path of a local tier have threads of their own.
5. The memory of a chunk stays valid, and the bytes of a put do not change, until the call returns.
6. `Tier.close` is called last. Other calls may still run; they fail.

What a tier guarantees:

1. It never raises for a fault outside of this process. A failed tier is a miss.
2. A get that returns OK gave exactly the bytes that were put. The tier checks this itself.
3. A put is all or nothing for every reader, other processes included.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final

from warmroute_common.agent_protocol import TierName
from warmroute_common.backoff import Backoff

Chunk = tuple[bytes, memoryview]
"""A chunk's key and its memory in the pool. A put reads the memory, a get fills it."""


class PutOutcome(Enum):
    """How a put ended. Only STORED keeps anything."""

    STORED = auto()
    """A get now returns these bytes."""
    NO_SPACE = auto()
    """The device or the server is full, although the tier is below its own capacity."""
    FAILED = auto()
    NOT_TRIED = auto()
    """The tier's server failed a short time ago, so it was not called."""


class GetOutcome(Enum):
    """How a get ended. The buffer holds the chunk only after OK."""

    OK = auto()
    MISSING = auto()
    DAMAGED = auto()
    """The bytes found were not the bytes stored. The tier has removed them."""
    FAILED = auto()
    """The tier could not be read. It keeps what it holds."""


class Tier(ABC):
    """Chunks of one size, by key. See the module for who calls what."""

    name: TierName
    batch_chunks: int = 1
    """At most this many chunks are passed to one call of `get_many` or `put_many`."""

    @abstractmethod
    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store chunks; return one outcome for each.

        Replaces the bytes of a key that the tier holds, or keeps them where the server's
        objects cannot change: a key always stands for the same bytes.
        """

    @abstractmethod
    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Fill buffers with chunks; return one outcome for each.

        Unless the outcome is OK, the content of a buffer is undefined afterwards.
        """

    def put(self, key: bytes, payload: memoryview) -> PutOutcome:
        """Store one chunk."""
        return self.put_many([(key, payload)])[0]

    def get(self, key: bytes, into: memoryview) -> GetOutcome:
        """Read one chunk."""
        return self.get_many([(key, into)])[0]

    @abstractmethod
    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks. Keys that the tier does not hold are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release files, locks and connections. Stored chunks stay. Idempotent."""


class LocalTier(Tier):
    """A tier that only this engine fills: its content changes by the engine's calls alone."""

    capacity_bytes: int
    """The most bytes that the tier may take; 0 means that it holds nothing."""
    item_bytes: int
    """Bytes that one chunk takes of the capacity, headers included."""

    @property
    def paths(self) -> int:
        """How many paths there are that can hang independently of each other."""
        return 1

    def path_of(self, key: bytes) -> int:
        """Return the path that a chunk belongs to. It is always the same."""
        return 0

    @abstractmethod
    def scan(self) -> list[bytes]:
        """Return the keys left by an earlier process, the next to leave first.

        Removes incomplete chunks.
        """

    def save(self, keys: Sequence[bytes], path: int = 0, *, is_final: bool) -> None:
        """Keep the order in which chunks leave a path, the next one first, for a later `scan`.

        ``is_final``: no other call but `close` runs or follows. Blocks. Keys of other paths are
        ignored.
        """


class SharedTier(Tier):
    """A tier that other engines fill too, and whose server evicts by its own rules.

    Its content is only known by asking, and may change at any moment.
    """

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Return for each key whether the tier holds it now; None if the tier cannot be asked."""

    @abstractmethod
    def purge(self, keys: Sequence[bytes] | None) -> int | None:
        """Remove these chunks, or all of this layout (None), whoever has put them.

        Blocks. Returns how many there were, None if some may be left.
        """


class NullTier(LocalTier):
    """Refuses every put and misses every get."""

    name = "disk"
    capacity_bytes = 0
    item_bytes = 1

    def scan(self) -> list[bytes]:
        return []

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        return [PutOutcome.NO_SPACE] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        return [GetOutcome.MISSING] * len(chunks)

    def delete(self, keys: Iterable[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 60.0


def tier_backoff() -> Backoff:
    """Return the pauses of a tier, or of one chunk in it, that the engine leaves alone."""
    return Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
