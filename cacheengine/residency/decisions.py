"""What the engine's decisions return: where a chunk is, promotions, and work to do. Pure."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

logger = logging.getLogger("vllm.warmroute")


PORTION: Final = 32
"""Chunks that are decided about in one hold of the engine's lock."""


class Presence(Enum):
    """Where a chunk is, as far as it can be used from there."""

    MISS = auto()
    PENDING = auto()
    """Being stored or promoted into the pool."""
    CPU = auto()
    """Ready in the pool."""
    DISK = auto()
    """Below the pool: a promotion is needed."""
    REMOTE = auto()
    """Known to be held by the remote tier, and by none nearer: a promotion is needed."""
    UNKNOWN = auto()
    """The remote tier is being asked for it: look again."""


@dataclass(frozen=True, slots=True)
class StoreReservation:
    """Reserved slots of the pool: ``slots[i]`` is for the chunk ``keys[i]``."""

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    evicted: tuple[bytes, ...]
    """Chunks that left the pool for that."""
    refused: tuple[bytes, ...] = ()
    """Chunks that found no room and are not in the pool either."""

    def joined(self, part: "StoreReservation") -> "StoreReservation":
        return StoreReservation(
            self.keys + part.keys,
            self.slots + part.slots,
            self.evicted + part.evicted,
            self.refused + part.refused,
        )


class PromotionOutcome(Enum):
    """How the wait of a promotion for one chunk ended."""

    RESIDENT = auto()
    PROMOTED = auto()
    MISSING = auto()
    REFUSED = auto()
    """The chunk is below the pool, which had no room for it, or too much was pinned."""


@dataclass(frozen=True, slots=True)
class PromotionCounts:
    """Chunks by outcome at one moment; they add up to those asked for."""

    resident: int
    """In the pool, or being stored into it, before the call."""
    promoted: int
    """Read into the pool since."""
    pending: int
    missing: int
    """In no tier, damaged, without room, or after the first such chunk."""


class Promotion:
    """Live counts of one call to promote; safe to read from any thread.

    The engine settles each chunk once. When none is pending, waiters wake and callbacks are called.
    ``holder`` is the request that the chunks are for, if there is one already; ``is_demand``: it
    waits for them.
    """

    def __init__(self, asked: int, holder: str | None = None, *, is_demand: bool = False) -> None:
        self.holder = holder
        self.is_demand = is_demand
        self.reads: dict[str, int] = {}
        """The last of its reads from each queue, by `ReadQueue.number`; under the engine's lock."""
        # Guards the counts and the callbacks: an I/O thread settles while
        # another thread reads or adds a callback.
        self._changed = threading.Condition(threading.Lock())
        self._ended: Counter[PromotionOutcome] = Counter()
        self._pending = asked
        self._callbacks: list[Callable[[], None]] = []

    @property
    def counts(self) -> PromotionCounts:
        """All four counts, of one moment."""
        with self._changed:
            return PromotionCounts(
                resident=self._ended[PromotionOutcome.RESIDENT],
                promoted=self._ended[PromotionOutcome.PROMOTED],
                pending=self._pending,
                missing=self._ended[PromotionOutcome.MISSING]
                + self._ended[PromotionOutcome.REFUSED],
            )

    @property
    def was_refused(self) -> bool:
        """Whether some chunks found no room, and may find it later."""
        with self._changed:
            return self._ended[PromotionOutcome.REFUSED] > 0

    @property
    def done(self) -> bool:
        """Whether nothing is pending."""
        return self.counts.pending == 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is pending; False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when nothing is pending: now, or on an I/O thread."""
        with self._changed:
            if self._pending > 0:
                self._callbacks.append(callback)
                return
        callback()

    def settle(self, outcome: PromotionOutcome, chunks: int = 1) -> None:
        """End the wait for this many chunks. The engine calls this without its lock."""
        with self._changed:
            self._pending -= chunks
            assert self._pending >= 0
            self._ended[outcome] += chunks
            if self._pending > 0:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # other promotions must still be settled
                logger.exception("a callback of a promotion failed")

    def __repr__(self) -> str:
        return f"<Promotion {self.counts}>"


@dataclass(slots=True)
class PendingWork:
    """Work that decisions leave to be done outside the lock.

    Counts and keys are by `LowerIndex.queues`.
    """

    gets: Counter[str] = field(default_factory=Counter)
    """How many reads were queued (`Promoter.take`)."""
    puts: Counter[str] = field(default_factory=Counter)
    """How many puts were queued (`Cascade.begin`)."""
    deletes: dict[str, list[bytes]] = field(default_factory=dict)
    """Chunks to delete; then `Cascade.deleted`."""
    has_questions: bool = False
    """There are questions to the remote tier (`PrefixPromotions.take_questions`)."""
    settled: list[tuple[Promotion, PromotionOutcome, int]] = field(default_factory=list)
    """Promotions of which some chunks are settled, and how many (`Promotion.settle`)."""
    clears: set[str] = field(default_factory=set)
    """Tiers that were cleared whole (`CacheState.remove_cleared`, `CacheState.take_cleared`)."""
    has_events: bool = False
    """Events were logged."""
