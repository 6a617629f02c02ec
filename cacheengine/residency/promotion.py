"""What became of one call to promote chunks into the CPU pool."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

logger = logging.getLogger("vllm.warmroute")


class Outcome(Enum):
    """How the wait for one chunk ended."""

    RESIDENT = auto()
    PROMOTED = auto()
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class PromotionCounts:
    """Chunks by outcome at one moment; they add up to those asked for."""

    resident: int
    promoted: int
    pending: int
    missing: int


class Promotion:
    """Live counts of one call; safe to read from any thread.

    The engine settles each chunk once; when none is pending, waiters and
    callbacks are called.
    """

    def __init__(self, asked: int, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        # Guards the counts and the callbacks: an I/O thread settles while
        # another thread reads or adds a callback.
        self._changed = threading.Condition(threading.Lock())
        self._resident = 0
        self._promoted = 0
        self._missing = 0
        self._pending = asked
        self._callbacks: list[Callable[[], None]] = []

    @property
    def counts(self) -> PromotionCounts:
        """All four counts of one moment."""
        with self._changed:
            return PromotionCounts(self._resident, self._promoted, self._pending, self._missing)

    @property
    def resident(self) -> int:
        """Chunks that were in the pool, or being stored into it, before the call."""
        return self.counts.resident

    @property
    def promoted(self) -> int:
        """Chunks read into the pool since."""
        return self.counts.promoted

    @property
    def pending(self) -> int:
        """Chunks still under way."""
        return self.counts.pending

    @property
    def missing(self) -> int:
        """Chunks in no tier, damaged, without room, or after the first such one."""
        return self.counts.missing

    @property
    def promoted_bytes(self) -> int:
        """Bytes of the promoted chunks."""
        return self.counts.promoted * self._chunk_bytes

    @property
    def done(self) -> bool:
        """Whether nothing is pending."""
        return self.counts.pending == 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is pending; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_s)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when nothing is pending: now, or on an I/O thread."""
        with self._changed:
            if self._pending > 0:
                self._callbacks.append(callback)
                return
        callback()

    def settle(self, outcome: Outcome, chunks: int = 1) -> None:
        """End the wait for so many chunks (the engine's side)."""
        with self._changed:
            self._pending -= chunks
            assert self._pending >= 0
            match outcome:
                case Outcome.RESIDENT:
                    self._resident += chunks
                case Outcome.PROMOTED:
                    self._promoted += chunks
                case Outcome.MISSING:
                    self._missing += chunks
            if self._pending > 0:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the engine's work, and others' waiting, must go on
                logger.exception("a callback of a promotion failed")

    def __repr__(self) -> str:
        return f"<Promotion {self.counts}>"
