"""Cache-aware rules: send a prompt where most of it was sent before, unless load is uneven.

The prompts that a replica was sent are a tree of blocks, cut least recently used first. A block
stands for all blocks before it, so a replica has the first blocks of a prompt and no later ones.
A longest match is therefore found by bisection.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.discrete.rules.rule import Asked, CountingRule


@dataclass(slots=True)
class _Part:
    """The part of the tree that one replica has."""

    blocks: int = 0
    ends: OrderedDict[int, Sequence[int]] = field(default_factory=OrderedDict)
    """Last blocks of the longest prompts, with all of their blocks; least recent first."""
    forks: dict[int, int] = field(default_factory=dict)
    """Blocks that more than one go on from, with how many more."""


class PrefixTree:
    """Which replicas were sent which blocks."""

    def __init__(self, replicas: int, max_blocks: int) -> None:
        """Limit each replica's part to this many blocks, at each `cut`."""
        self._max_blocks = max_blocks
        self._parts = [_Part() for _ in range(replicas)]
        self._holders: dict[int, int] = {}
        self._first: dict[int, int] = {}
        """Of blocks that more than one replica was sent: which was the first."""

    def depth(self, blocks: Sequence[int], replica: int | None = None) -> int:
        """Return how many of a prompt's blocks a replica was sent before, or any at all."""
        bits, holders = -1 if replica is None else 1 << replica, self._holders
        return bisect_left(blocks, True, key=lambda block: not holders.get(block, 0) & bits)

    def first_sent(self, block: int) -> int:
        """Return the replica that was sent a block first, and still has it, or another with it."""
        if block in self._first:
            return self._first[block]
        return _lowest(self._holders[block])

    def insert(self, blocks: Sequence[int], replica: int) -> None:
        """Note that a replica is sent a prompt."""
        if not blocks:
            return
        depth, part = self.depth(blocks, replica), self._parts[replica]
        for block in blocks[depth:]:
            self._add(block, replica)
        part.blocks += len(blocks) - depth
        if depth < len(blocks):
            self._go_on(part, blocks, depth)
        elif blocks[-1] in part.ends:
            part.ends.move_to_end(blocks[-1])

    def cut(self) -> None:
        """Take the least recent ends from each part that is over its bound."""
        for replica, part in enumerate(self._parts):
            while part.blocks > self._max_blocks:
                self._cut_end(part, replica)

    def _add(self, block: int, replica: int) -> None:
        before = self._holders.get(block, 0)
        if before and block not in self._first:
            self._first[block] = _lowest(before)
        self._holders[block] = before | 1 << replica

    @staticmethod
    def _go_on(part: _Part, blocks: Sequence[int], depth: int) -> None:
        """Note where a prompt with new blocks leaves the blocks that the part had before."""
        part.ends[blocks[-1]] = blocks
        if depth and part.ends.pop(blocks[depth - 1], None) is None:
            part.forks[blocks[depth - 1]] = part.forks.get(blocks[depth - 1], 0) + 1

    def _cut_end(self, part: _Part, replica: int) -> None:
        _, blocks = part.ends.popitem(last=False)
        for at in range(len(blocks) - 1, -1, -1):
            if part.blocks <= self._max_blocks:
                # What is left of the prompt is as old as all of it was.
                part.ends[blocks[at]] = blocks[: at + 1]
                part.ends.move_to_end(blocks[at], last=False)
                return
            self._remove(blocks[at], replica)
            part.blocks -= 1
            if at and self._close_fork(part, blocks[at - 1]):
                return

    @staticmethod
    def _close_fork(part: _Part, block: int) -> bool:
        """Take one of the ways on from a block; return whether another is left."""
        more = part.forks.pop(block, 0)
        if more > 1:
            part.forks[block] = more - 1
        return more > 0

    def _remove(self, block: int, replica: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
        if self._first.get(block) == replica or left & (left - 1) == 0:
            self._first.pop(block, None)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class CacheAware(CountingRule):
    """The common part: the balance, the tree and its cuts; load is requests in flight.

    The routers keep a tree of characters; here it is one of blocks (`PrefixTree`).
    """

    def __init__(
        self,
        replicas: int,
        *,
        cache_threshold: float,
        balance_abs: int,
        balance_rel: float,
        eviction_interval_s: float,
        max_tree_tokens: int,
        block_tokens: int,
    ) -> None:
        """Set when a match is good enough, load is uneven, and how large the tree may be.

        Load is uneven where its greatest is over its least by more than `balance_abs`, and
        over `balance_rel` times it. A replica's part of the tree is cut to
        `max_tree_tokens` every `eviction_interval_s`.
        """
        super().__init__(replicas)
        self.tree = PrefixTree(replicas, max_tree_tokens // block_tokens)
        self._threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._interval_s = eviction_interval_s
        self._cut_due_s = eviction_interval_s

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a prompt where it matches, or to the least load; the tree learns it either way."""
        self._cut(now_s)
        warm = None if self._is_uneven(healthy) else self._warmest(asked, healthy)
        replica = self.in_flight.least(healthy) if warm is None else warm
        self.tree.insert(asked.blocks, replica)
        self.in_flight.sent(asked.id, replica)
        return replica

    def _warmest(self, asked: Asked, healthy: Sequence[int]) -> int | None:
        """Return the replica that has enough of a prompt, if there is one."""
        raise NotImplementedError

    def _is_enough(self, asked: Asked, depth: int) -> bool:
        return depth * asked.block_tokens > self._threshold * asked.prompt_tokens

    def _is_uneven(self, healthy: Sequence[int]) -> bool:
        loads = [self.in_flight.requests[each] for each in healthy]
        most, least = max(loads), min(loads)
        return most - least > self._balance_abs and most > least * self._balance_rel

    def _cut(self, now_s: float) -> None:
        if now_s >= self._cut_due_s:
            self._cut_due_s = now_s - now_s % self._interval_s + self._interval_s
            self.tree.cut()


class SglangCacheAware(CacheAware):
    """SGLang's: the deepest match of any replica counts, and is whose it was first.

    sglang-router 0.3.2, policy `cache_aware`: `sgl-model-gateway/src/policies/cache_aware.rs`
    and `tree.rs`, defaults of its launcher; 2**26 characters a replica, of 4 a token.
    """

    def __init__(
        self,
        replicas: int,
        *,
        block_tokens: int,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        eviction_interval_s: float = 60.0,
        max_tree_tokens: int = 2**26 // 4,
    ) -> None:
        """Take the router's defaults; see `CacheAware`."""
        super().__init__(
            replicas,
            cache_threshold=cache_threshold,
            balance_abs=balance_abs,
            balance_rel=balance_rel,
            eviction_interval_s=eviction_interval_s,
            max_tree_tokens=max_tree_tokens,
            block_tokens=block_tokens,
        )

    def _warmest(self, asked: Asked, healthy: Sequence[int]) -> int | None:
        depth = self.tree.depth(asked.blocks)
        if not depth or not self._is_enough(asked, depth):
            return None
        owner = self.tree.first_sent(asked.blocks[depth - 1])
        return owner if owner in healthy else healthy[0]


class VllmCacheAware(CacheAware):
    """vLLM's: of the replicas that have most of the prompt, the least loaded.

    vllm-router 0.1.17, policy `cache_aware`: as its program decides when it is asked, with
    the defaults of its launcher; 2**25 characters a replica, of which it takes 8 a token.
    `docs/load_balancing/README.md` recommends 0.5 / 32 / 1.1 for threshold and balance.
    """

    def __init__(
        self,
        replicas: int,
        *,
        block_tokens: int,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        eviction_interval_s: float = 120.0,
        max_tree_tokens: int = 2**25 // 8,
    ) -> None:
        """Take the router's defaults; see `CacheAware`."""
        super().__init__(
            replicas,
            cache_threshold=cache_threshold,
            balance_abs=balance_abs,
            balance_rel=balance_rel,
            eviction_interval_s=eviction_interval_s,
            max_tree_tokens=max_tree_tokens,
            block_tokens=block_tokens,
        )

    def _warmest(self, asked: Asked, healthy: Sequence[int]) -> int | None:
        depths = {each: self.tree.depth(asked.blocks, each) for each in healthy}
        most = max(depths.values())
        if not most or not self._is_enough(asked, most):
            return None
        return self.in_flight.least([each for each in healthy if depths[each] == most])
