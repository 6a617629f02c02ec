"""The chunks of each session's last prompt, and at which replica. Pure, bounded.

So that a prefetch can start when a session's next turn comes, before its
tokens are known.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ENTRY_BYTES: Final = 300
"""What an entry takes beside its keys and its name."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks of a prompt at one replica."""

    replica_id: str
    packed: bytes
    """Whole digests, joined: a list of them would take three times the memory."""
    digest_bytes: int
    last_s: float

    def keys(self) -> tuple[bytes, ...]:
        """Return the chunks' keys, in prefix order."""
        size = self.digest_bytes
        return tuple(self.packed[at : at + size] for at in range(0, len(self.packed), size))


class SessionChains:
    """The last chain of each session; the least recently used is forgotten first.

    ``evicted`` counts those forgotten for want of room, not of time.
    """

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.evicted = 0
        self.used_bytes = 0
        self._chains: OrderedDict[str, Chain] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def note(self, session: str, replica_id: str, keys: Sequence[bytes], now_s: float) -> None:
        """Note the chunks of a session's latest prompt; without any it is forgotten."""
        self._expire(now_s)
        self._forget(session)
        if not keys:
            return
        chain = Chain(replica_id, b"".join(keys), len(keys[0]), now_s)
        self._chains[session] = chain
        self.used_bytes += _size(session, chain)
        while self.used_bytes > self.max_bytes:
            self._forget(next(iter(self._chains)))
            self.evicted += 1

    def get(self, session: str, now_s: float) -> Chain | None:
        """Return a session's chain, None if it has none (any more); changes nothing."""
        chain = self._chains.get(session)
        return None if chain is None or chain.last_s + self.ttl_s <= now_s else chain

    def check(self) -> None:
        """Raise AssertionError if the table contradicts itself."""
        sizes = sum(_size(session, chain) for session, chain in self._chains.items())
        assert sizes == self.used_bytes <= self.max_bytes
        times = [chain.last_s for chain in self._chains.values()]
        assert times == sorted(times), "the least recently used does not stand first"

    def _forget(self, session: str) -> None:
        chain = self._chains.pop(session, None)
        if chain is not None:
            self.used_bytes -= _size(session, chain)

    def _expire(self, now_s: float) -> None:
        while self._chains:
            session, chain = next(iter(self._chains.items()))
            if chain.last_s + self.ttl_s > now_s:
                return
            self._forget(session)


def _size(session: str, chain: Chain) -> int:
    return _ENTRY_BYTES + len(session) + len(chain.packed)
