"""What replicas are believed to hold: speculative entries, of prompts being computed there.

Pure state: no clock, no I/O.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from math import inf


@dataclass(eq=False, slots=True)
class Claim:
    """Keys that a replica is believed to hold on its GPU; none once it has ended."""

    replica: int
    keys: Sequence[int] = field(repr=False)
    former: "Sequence[Claim | None]" = field(default=(), repr=False)
    """Of its first keys the claims whose place it took: most of them share a beginning."""


class Claims:
    """The claims on all replicas. Of several on one key the latest counts until it ends."""

    def __init__(self) -> None:
        self._by_replica: dict[int, dict[int, Claim]] = {}
        self._by_end: list[tuple[float, int, Claim]] = []
        self._made = 0
        self._keys = 0

    def __len__(self) -> int:
        """Return how many keys the claims have together."""
        return self._keys

    def of(self, replica: int) -> dict[int, Claim]:
        """Return the keys that a replica is believed to hold, each with the claim that counts.

        What is known of a key ends its belief: it is then taken out here.
        """
        return self._by_replica.setdefault(replica, {})

    def add(self, replica: int, keys: Sequence[int], until_s: float) -> Claim:
        """Claim keys until a time."""
        believed = self.of(replica)
        claim = Claim(replica, keys, tuple(takewhile(bool, map(believed.get, keys))))
        if keys:
            believed.update(dict.fromkeys(keys, claim))
            self._made += 1
            heapq.heappush(self._by_end, (until_s, self._made, claim))
            self._keys += len(keys)
        return claim

    def pop(self, now_s: float = inf) -> Claim | None:
        """Take out the claim whose time is over first, if it is over by now; `end` it then."""
        if self._by_end and self._by_end[0][0] <= now_s:
            return heapq.heappop(self._by_end)[2]
        return None

    def end(self, claim: Claim) -> list[int]:
        """End a claim; return the keys that no other one is left on."""
        believed = self.of(claim.replica)
        ended: list[int] = []
        for key, former in zip_longest(claim.keys, claim.former):
            if believed.get(key) is not claim:
                continue
            if former is not None and former.keys:  # it has not ended
                believed[key] = former
            else:
                del believed[key]
                ended.append(key)
        self._keys -= len(claim.keys)
        claim.keys = claim.former = ()
        return ended

    def forget(self, replica: int) -> dict[int, Claim]:
        """Believe nothing of a replica any more; return what was believed."""
        return self._by_replica.pop(replica, {})

    def items(self) -> Iterable[tuple[int, dict[int, Claim]]]:
        """Return what is believed of each replica."""
        return self._by_replica.items()

    def check(self) -> None:
        """Raise AssertionError if the claims contradict each other."""
        claims = {id(claim): claim for _, _, claim in self._by_end}
        assert self._keys == sum(len(claim.keys) for claim in claims.values())
        for replica, believed in self.items():
            for key, claim in believed.items():
                assert id(claim) in claims and claim.replica == replica and key in claim.keys
