"""Cache-aware rules: send a prompt where most of it was sent before, unless load is uneven."""

from collections.abc import Sequence

from bench.discrete.rules.in_flight import CountingRule
from bench.discrete.rules.prefix_tree import PrefixTree
from bench.discrete.rules.rule import Asked


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
