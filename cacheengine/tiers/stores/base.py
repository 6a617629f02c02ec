"""The contract of a remote server that keeps named blobs.

An adapter speaks one server's protocol and nothing else: names, envelopes,
checksums, compression and backoff are the remote tier's (`tiers.remote`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


class StoreError(Exception):
    """The server could not be reached, did not answer in time, or answered nonsense.

    What the call was to do may have been done in part. The next call finds a
    sound connection or raises again: never an answer that belongs to this one.
    """


class StoreRestingError(StoreError):
    """The server has failed lately and was not called: it is left alone for a while."""


class StoreFullError(StoreError):
    """The server takes no more for now; what it has can be read all the same."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A named run of bytes to put, in parts that need not lie side by side."""

    name: str
    parts: Sequence[memoryview | bytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Target(Blob):
    """Where a blob is to be read: its first bytes into the first part, and so on."""

    parts: Sequence[memoryview]


class BlobStore(ABC):
    """Blobs by name; safe to call from several threads at once.

    Every call is one batch, pipelined where the protocol can. Raises
    `StoreError` when the batch as a whole failed; a deadline bounds each call.
    Blobs vanish at the server's will.
    """

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Say for each name whether the server holds it now."""

    @abstractmethod
    def get_many(self, targets: Sequence[Target]) -> list[int | None]:
        """Read blobs; return each one's size in bytes, None for one that is not there.

        A blob larger than its target is not an error: its true size is
        returned, and what the target then holds is undefined.
        """

    @abstractmethod
    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        """Store blobs, replacing what had their names; say which are stored.

        Each is all or nothing: no reader ever sees half of one. Raises
        `StoreFullError` when none was stored because the server takes no more.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove blobs; absent ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Idempotent."""
