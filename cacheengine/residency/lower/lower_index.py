"""What the engine's decisions ask of a tier below the pool."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto

from cacheengine.tiers import GetOutcome
from warmroute_common.agent_protocol import TierName


class Residence(Enum):
    """The life of a chunk in the tier. Only HELD ones can be found."""

    WRITING = auto()
    HELD = auto()
    DELETING = auto()
    REPLACED = auto()
    """Being deleted to make room for one that is WRITING and waits for it."""


class Activity(Enum):
    """What is under way with a chunk; one thing at a time."""

    WRITING = auto()
    READING = auto()
    DELETING = auto()


class LowerIndex(ABC):
    """Which chunks a lower tier holds, as far as is known, and what goes on with them.

    Pure bookkeeping: no I/O, no clock, no threads. The engine's I/O
    writes, reads and deletes, and reports back.
    """

    name: TierName
    capacity_bytes: int = 0
    """How much it may hold; 0 where that is not known, or nothing."""
    has_breaker: bool = False
    """The tier finds out by itself for how long a server that fails is left alone."""

    @property
    def is_there(self) -> bool:
        """Whether there is such a tier at all."""
        return True

    @property
    def used_bytes(self) -> int:
        """How much of that is taken."""
        return 0

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk is held, as far as is known, and may be found."""

    def can_read(self, key: bytes, now_s: float) -> bool:
        """Whether the chunk may be found, and the tier is not being left alone."""
        return key in self

    @abstractmethod
    def keys(self) -> list[bytes]:
        """Return the keys that may be found, least recent first."""

    @abstractmethod
    def is_known(self, key: bytes) -> bool:
        """Whether the chunk is there, on its way in, or on its way out: not to be put."""

    def must_rewrite(self, key: bytes) -> bool:
        """Whether the chunk is there and cannot be read: to be put once more (`reserve`)."""
        return False

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Make a chunk the most recent, if it is there."""

    @abstractmethod
    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk that is not known, or anew; return what must be deleted first.

        Returns None, changing nothing, when there cannot be room. `forget` the
        deleted ones, then `publish` or `not_written`.
        """

    @abstractmethod
    def publish(self, key: bytes) -> bool:
        """End a write that succeeded. False: it was cleared meanwhile, delete it and `forget`."""

    @abstractmethod
    def forget(self, key: bytes) -> None:
        """Drop a chunk that is gone: deleted, or never written."""

    def not_written(self, key: bytes) -> bool:
        """End a write that failed. False: what was there before is to be deleted, then `forget`."""
        self.forget(key)
        return True

    @abstractmethod
    def begin_read(self, key: bytes) -> None:
        """Keep a chunk that may be found while it is read, and make it the most recent."""

    @abstractmethod
    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        """End a read. True: the chunk must be deleted now, then `forget` it."""

    @abstractmethod
    def clear(self, keys: Collection[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hide these chunks; pins end.

        Returns the keys that could be found, and those to delete now (then
        `forget`). A chunk being read or written is deleted when that ends
        (`end_read`, `publish`).
        """

    @abstractmethod
    def clear_all(self) -> None:
        """Hide everything, in one step; pins end.

        Then `take_cleared`, until there is nothing to take, with a chance for others in between.
        """

    @abstractmethod
    def take_cleared(self, most: int) -> tuple[list[bytes], bool]:
        """Return some of what was hidden to delete now (then `forget`); and whether more is there.

        A chunk being read or written is deleted when that ends (`end_read`, `publish`).
        """

    def take_forgotten(self) -> list[bytes]:
        """Return what could be found and is forgotten since the last call, for want of memory."""
        return []

    def operator_pin(self, key: bytes) -> bool:
        """Pin a chunk that may be found until `operator_unpin`; False where that cannot be."""
        return False

    def operator_unpin(self, key: bytes) -> bool:
        """End a chunk's pin; False if it has none."""
        return False

    def limit_to_used(self) -> None:  # noqa: B027  (a shared tier's server limits it)
        """Hold no more than now, until `restore_limit`: the capacity is not really there."""

    def restore_limit(self) -> None:  # noqa: B027
        """Use the whole capacity again."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
