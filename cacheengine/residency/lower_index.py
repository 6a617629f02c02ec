"""The contract of a lower tier's index: which chunks the tier holds, as far as is known."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from enum import Enum, auto

from cacheengine.tiers.tier import GetOutcome
from warmroute_common.agent_protocol import TierName


class Activity(Enum):
    """An operation under way with a chunk of a lower tier. There is one at a time."""

    WRITING = auto()
    READING = auto()
    DELETING = auto()


class LowerIndex(ABC):
    """Which chunks a lower tier holds, and which operation is under way with each of them.

    Pure bookkeeping under the engine's lock. The engine's I/O writes, reads and deletes without
    the lock, and each operation has two calls here, one before it and one after:

    - a write: `reserve`, then `publish` or `not_written`;
    - a read: `begin_read`, then `end_read`;
    - a delete of keys that one of these calls returned: `forget`.

    A chunk that is cleared is hidden at once. It is deleted when nothing is under way with it:
    at once, or as the second call of its operation says.
    """

    name: TierName
    capacity_bytes: int = 0
    """How much the tier may hold; 0 if that is not known, or nothing."""
    has_breaker: bool = False
    """The tier itself decides for how long a server that fails is left alone."""
    queues: Sequence[str]
    """The names of its queues of reads and writes, one for each path that may hang alone."""
    hanging: frozenset[str] = frozenset()
    """Queues with a read under way for too long (`Promoter.watch`)."""
    is_closed: bool = False
    """The engine ends."""

    def queue_of(self, key: bytes) -> str:
        """Return the queue of a chunk. It is always the same."""
        return self.queues[0]

    def is_suspended(self, queue: str) -> bool:
        """Whether nothing of this queue is read now."""
        return self.is_closed or queue in self.hanging

    @property
    def is_there(self) -> bool:
        """Whether there is such a tier at all."""
        return True

    @property
    def used_bytes(self) -> int:
        """How much of the capacity is taken."""
        return 0

    # --- lookups ---

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk can be found: it is held, as far as is known, and not hidden."""

    @abstractmethod
    def can_read(self, key: bytes, now_s: float) -> bool:
        """Whether the chunk can be found, and neither a pause nor a hanging tier prevents it."""

    @abstractmethod
    def keys(self) -> list[bytes]:
        """Return the keys that can be found, the next to leave first. For the start and tests."""

    @abstractmethod
    def is_known(self, key: bytes) -> bool:
        """Whether the chunk is there, being written or being deleted: it must not be put."""

    def must_rewrite(self, key: bytes) -> bool:
        """Whether the chunk is there and cannot be read: it should be put again (`reserve`)."""
        return False

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Note a use of a chunk, if it can be found."""

    # --- writes, reads, deletes ---

    @abstractmethod
    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk. Precondition: it is not known, or must be rewritten.

        Returns the chunks to delete first, or None if there cannot be room; then nothing changes.
        """

    @abstractmethod
    def publish(self, key: bytes) -> bool:
        """End a write that succeeded: the chunk can be found. False: it was cleared, delete it."""

    @abstractmethod
    def not_written(self, key: bytes) -> bool:
        """End a write that failed. False: what was there before was cleared, delete it."""

    @abstractmethod
    def begin_read(self, key: bytes) -> None:
        """Keep a chunk while it is read; this is a use. Precondition: it can be found."""

    @abstractmethod
    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        """End a read. True: the chunk was cleared meanwhile, delete it."""

    @abstractmethod
    def forget(self, key: bytes) -> None:
        """End a delete."""

    def take_forgotten(self) -> list[bytes]:
        """Return keys that were forgotten since the last call, to bound memory."""
        return []

    # --- clearing ---

    @abstractmethod
    def hide(self, keys: Collection[bytes]) -> list[bytes]:
        """Clear these chunks and end their pins; return those to delete now."""

    @abstractmethod
    def hide_all(self) -> None:
        """Clear everything and end all pins, in one step. Then `take_hidden`, for all keys."""

    def forget_all(self) -> None:
        """Forget which chunks are held, in one step. Then `take_hidden`, for all keys."""
        raise NotImplementedError(f"the {self.name} tier is not shared")

    @abstractmethod
    def take_hidden(self, keys: Collection[bytes]) -> list[bytes]:
        """Return those of these keys that are hidden and idle, to delete now."""

    # --- operators' pins, limits ---

    def operator_pin(self, key: bytes) -> bool:
        """Pin a chunk that can be found until `operator_unpin`; False if it cannot be pinned."""
        return False

    def operator_unpin(self, key: bytes) -> bool:
        """End a chunk's pin; False if it has none."""
        return False

    def limit_to_used(self) -> None:  # noqa: B027  (the server of a shared tier limits it)
        """Hold no more than now, until `restore_limit`: the device has less than the capacity."""

    def restore_limit(self) -> None:  # noqa: B027
        """Use the whole capacity again."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
