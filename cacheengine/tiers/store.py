"""The contract of a server that keeps named blobs, and what its adapters share.

An adapter speaks one server's protocol. Names, checksums and compression are the remote tier's
(`tiers.remote`).
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from warmroute_common.backoff import Backoff

SLOWEST_BYTES_S: Final = 10e6
"""A batch is given up when its bytes move more slowly than this."""


class StoreError(Exception):
    """The server could not be reached, did not answer in time, or broke its protocol.

    Part of the call may have been done. The answer to this call is never taken for the answer
    to a later one.
    """


class StorePausedError(StoreError):
    """The server failed a short time ago and was not called."""


class StoreFullError(StoreError):
    """The server stores nothing more for now. What it holds can still be read."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A named run of bytes to put, in parts that need not be adjacent in memory."""

    name: str
    parts: Sequence[memoryview | bytes]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class ReadTarget(Blob):
    """The memory that a blob is read into: its first bytes into the first part, and so on."""

    parts: Sequence[memoryview]


class BlobStore(ABC):
    """Blobs by name. Several threads call at once.

    Each call is one batch, pipelined where the protocol allows it, and bounded by a deadline.
    Raises `StoreError` when the batch failed as a whole. The server may drop blobs at any time.
    """

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the server holds it now. Where it evicts, this is a use."""

    @abstractmethod
    def get_many(self, targets: Sequence[ReadTarget]) -> list[int | None]:
        """Read blobs; return the size in bytes of each, None for one that is missing.

        For a blob larger than its target the true size is returned, and the content of the
        target is undefined.
        """

    @abstractmethod
    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        """Store blobs, replacing blobs of the same names; return for each whether it is stored.

        Each is all or nothing: no reader ever sees a part of one. Raises `StoreFullError` when
        none was stored because the server is full.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove blobs. Names that the server does not hold are ignored."""

    def remove_all(self, prefix: str) -> int:
        """Remove all blobs whose names begin like this, whoever stored them; return how many.

        `StoreError`: some may be left. Stores that cannot list their blobs always raise it.
        """
        raise StoreError(
            "cannot list its chunks, so only those that this replica knows are removed"
        )

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Calls that are running fail. Idempotent."""


class Deadline:
    """A moment in time that a call must not pass."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    @classmethod
    def for_batch(cls, timeout_s: float, size_bytes: int) -> "Deadline":
        """Return the deadline of a call that moves this many bytes."""
        return cls(timeout_s + size_bytes / SLOWEST_BYTES_S)

    def extend(self, seconds: float) -> None:
        """Move it later."""
        self.timeout_s += seconds
        self._at_s += seconds

    def left_s(self) -> float:
        """Return the seconds left; raise `TimeoutError` if there are none."""
        if left_s := self.wait_s():
            return left_s
        raise TimeoutError

    def wait_s(self) -> float:
        """Return the seconds left, 0 if there are none."""
        return max(0.0, self._at_s - time.monotonic())


class ServerBackoff:
    """Pauses in which a server that failed is not called. Thread-safe.

    Pauses double up to ``longest_s``. Each is shortened by up to a half at random, so that the
    replicas of a fleet do not return all at once. After a pause one caller tries; the others
    wait for its result. The engine above pauses a failing remote tier for one second at a time:
    this is the only pause that grows.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.2,
        longest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._backoff = Backoff(first_s, longest_s)

    def now_s(self) -> float:
        """Return the time to pass to `failed` later."""
        return self._clock()

    def admit(self) -> float:
        """Return 0 if the server may be called now, otherwise the seconds left of the pause."""
        with self._lock:
            now_s = self._clock()
            return 0.0 if self._backoff.may_try(now_s) else self._backoff.left_s(now_s)

    def succeeded(self) -> None:
        """Record that a call succeeded."""
        if self._backoff.is_failing:  # without the lock: it is nearly always false
            with self._lock:
                self._backoff.reset()

    def failed(self, began_s: float) -> None:
        """Record that a call that began at ``began_s`` failed."""
        with self._lock:
            shortened_by = self._chance() / 2
            self._backoff.failed(self._clock(), began_s=began_s, shortened_by=shortened_by)
