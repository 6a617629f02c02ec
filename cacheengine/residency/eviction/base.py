"""What the pool's index asks of an eviction policy.

A policy knows keys and their use, nothing else: whether a chunk may leave now
(it is neither held nor pinned) is decided by the index. One that may not is
passed over, so that the next eviction does not come across it again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator


class EvictionPolicy(ABC):
    """An order over keys. Every key is added once, then touched, then removed or evicted."""

    @abstractmethod
    def add(self, key: bytes) -> None:
        """Take in a key that is not known yet."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Note a use of a known key."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a known key, for reasons that say nothing about its worth."""

    def evict(self, key: bytes) -> None:
        """Forget a known key that made room; a policy may learn from its return."""
        self.remove(key)

    @abstractmethod
    def candidates(self) -> Iterator[bytes]:
        """Yield the keys that are not passed over, the one to evict first at the front."""

    @abstractmethod
    def pass_over(self, key: bytes) -> None:
        """Leave a candidate out until `resume` or `touch`; in the order of `candidates`."""

    @abstractmethod
    def resume(self, key: bytes) -> None:
        """Put a key passed over back in its place; nothing if it is not, or not known."""

    @abstractmethod
    def renewed(self) -> "EvictionPolicy":
        """Return an empty policy that has learned what this one has; this one is only emptied."""

    @abstractmethod
    def order(self) -> Iterator[bytes]:
        """Yield all keys, the one to evict first at the front; not for where there are many."""

    @abstractmethod
    def __len__(self) -> int: ...
