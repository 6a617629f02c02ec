"""AIBrix's rule: the best match that is not busier than usual."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from bench.discrete.rules.rule import Asked, CountingRule


class Aibrix(CountingRule):
    """The greatest match whose requests are at most a standard deviation over the mean.

    AIBrix 0.5, `prefix-cache`: `pkg/plugins/gateway/algorithms/prefix_cache.go` and
    `pkg/utils/prefixcacheindexer/hash.go`. Where requests in flight, as the gateway counts
    them, are uneven by more than `imbalance`, the least loaded, equal ones by chance.
    Matches are compared by whole percents; of equal ones the less loaded is tried first.
    """

    def __init__(
        self,
        replicas: int,
        *,
        seed: int,
        block_tokens: int,
        imbalance: int = 8,
        deviations: float = 1.0,
        max_tokens: int = 200_000 * 128 // 4,
        ttl_s: float = 20 * 60.0,
    ) -> None:
        """Take the gateway's defaults.

        Its table bounds blocks of 128 characters, taken as 4 a token; a block that is not
        sent again for `ttl_s` is forgotten.
        """
        super().__init__(replicas)
        self._imbalance = imbalance
        self._deviations = deviations
        self._chooser = random.Random(seed)
        self._table = _PrefixTable(replicas, max_tokens // block_tokens, ttl_s)

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request where it matches, or to the least load; the table learns it."""
        self._table.expire(now_s)
        matched = None if self._is_uneven(healthy) else self._matched(asked, healthy)
        replica = self._least(healthy) if matched is None else matched
        self._table.sent(asked.blocks, replica, now_s)
        self.in_flight.sent(asked.id, replica)
        return replica

    def _is_uneven(self, healthy: Sequence[int]) -> bool:
        loads = [self.in_flight.requests[each] for each in healthy]
        return max(loads) - min(loads) > self._imbalance

    def _least(self, healthy: Sequence[int]) -> int:
        requests = self.in_flight.requests
        least = min(requests[each] for each in healthy)
        return self._chooser.choice([each for each in healthy if requests[each] == least])

    def _matched(self, asked: Asked, healthy: Sequence[int]) -> int | None:
        """Return the best match that is not too busy, if there is one."""
        requests, matches = self.in_flight.requests, self._table.matches(asked.blocks, healthy)
        loads = [requests[each] for each in healthy]
        bound = fmean(loads) + self._deviations * pstdev(loads)
        fit = [each for each in matches if requests[each] <= bound]
        if not fit:
            return None
        ranks = {each: (-matches[each], requests[each]) for each in fit}
        best = min(ranks.values())
        return self._chooser.choice([each for each in fit if ranks[each] == best])


class _PrefixTable:
    """Blocks with the replicas that were sent them, a bit each; the least recent are lost.

    The sending of a block that came last has its time: blocks are lost in the order of
    these, and within a prompt from its first on.
    """

    def __init__(self, replicas: int, max_blocks: int, ttl_s: float) -> None:
        self._replicas = replicas
        self._everyone = (1 << replicas) - 1
        self._max_blocks = max_blocks
        self._ttl_s = ttl_s
        self._entries: dict[int, int] = {}
        """Per block: the number of its last sending, and below it the bits of the replicas."""
        self._sent: deque[_Sending] = deque()
        self._number = 0

    def matches(self, blocks: Sequence[int], healthy: Sequence[int]) -> dict[int, int]:
        """Return whole percents of a prompt by replica, of those with its first block."""
        percents: dict[int, int] = {}
        alive = sum(1 << each for each in healthy)
        for at, block in enumerate(blocks):
            now = alive & self._entries.get(block, 0)
            if now != alive:
                if at:
                    percents.update(dict.fromkeys(_members(alive & ~now), at * 100 // len(blocks)))
                alive = now
            if not alive:
                return percents
        return percents | dict.fromkeys(_members(alive) if blocks else (), 100)

    def sent(self, blocks: Sequence[int], replica: int, now_s: float) -> None:
        """Note that a replica is sent a prompt."""
        self._number += 1
        entries, everyone = self._entries, self._everyone
        entry = self._number << self._replicas | 1 << replica
        for block in blocks:
            entries[block] = entries.get(block, 0) & everyone | entry
        self._sent.append(_Sending(self._number, now_s, blocks))
        while len(entries) > self._max_blocks:
            self._forget_next()

    def expire(self, now_s: float) -> None:
        """Forget blocks that were not sent for long."""
        while self._sent and now_s - self._sent[0].at_s > self._ttl_s:
            self._forget_next()

    def _forget_next(self) -> None:
        """Forget the next block of the oldest sending, if it was not sent again."""
        oldest = self._sent[0]
        if oldest.forgotten == len(oldest.blocks):
            self._sent.popleft()
            return
        block = oldest.blocks[oldest.forgotten]
        oldest.forgotten += 1
        if self._entries.get(block, 0) >> self._replicas == oldest.number:
            del self._entries[block]


@dataclass(slots=True)
class _Sending:
    """A prompt that was sent."""

    number: int
    at_s: float
    blocks: Sequence[int]
    forgotten: int = 0
    """How many of its blocks have been seen to, from the first on."""


def _members(bits: int) -> list[int]:
    return [each for each in range(bits.bit_length()) if bits >> each & 1]
