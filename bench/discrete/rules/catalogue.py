"""The rules by the names of their contenders, and where they differ from their originals.

Rules without a view of caches are here too: by load, round robin, by the client's session.

Each rule's docstring names its source. For all of them: replicas that are equal are tried in the
order of their numbers, where the original goes by its registry's order. Prompts are full blocks,
so a match ends at a block where trees of characters end within one. Bounds in characters take 4 of
them as a token where the original does not fix it. Retries and circuit breakers are the driver's,
or left out; none queues requests by default.

- `sglang-cache-aware`: a leaf of its tree is cut block by block, not whole; a prompt that ends
  within another one does not make that one more recent.
- `vllm-cache-aware`, `vllm-cache-aware-tuned`: the same. The page that recommends 0.5 / 32 / 1.1
  also lists a cut every 30 s and 10,000 nodes, which its command does not set.
- `vllm-kv-aware`: by the program, not its source: the rule is what 0.1.17 logs and does.
- `vllm-kv-aware-sessions`: no time to live is recommended for sessions; 3,600 s is the time for
  which the router keeps sessions elsewhere.
- `power-of-two`: load is the requests in flight; the loads that it could ask replicas for are left
  out, since vLLM counts for its `/load` only where that is configured.
- `consistent-hash`, `sticky-least-loaded`: other hash functions; a body without a session is known
  by its blocks and its length.
- `dynamo`: answers' blocks are not tracked (its default); requests that never end are not expired,
  since here all end. `dynamo-predicted` is the same with `predicted_ttl_s` of 5, as its
  documentation advises for bursts of equal prompts.
- `llm-d`: its bound of 10**8 blocks is beyond what the replicas hold; the driver scrapes. A
  speculative entry of a request ends with that request's 2 s even where a later request has the
  same blocks; here it lives on with the later one.
- `llm-d-affinity`: a contender of its own, since its documentation forbids to combine the filter
  with a weighted prefix score. The guides give the filter an estimate from what was sent; here it
  has the KV events, as `llm-d` has. Requests are not expired after 5 minutes, since here all end.
- `aibrix-prefix-cache`: blocks are the engine's, not 128 characters; the newest version asks for
  more before it calls the load uneven.
"""

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final

from bench.discrete.rules.aibrix import Aibrix
from bench.discrete.rules.cache_aware import SglangCacheAware, VllmCacheAware
from bench.discrete.rules.fixed_split import FixedSplit
from bench.discrete.rules.kv_aware import Dynamo, DynamoWeights, KvAware, KvAwareSessions
from bench.discrete.rules.llm_d import LlmD, LlmDAffinity
from bench.discrete.rules.rule import Asked, CountingRule, Rule


class PowerOfTwo(CountingRule):
    """Take the less loaded of two replicas that are drawn at random.

    vllm-router 0.1.17, `src/policies/power_of_two.rs`; equal load goes to the first drawn.
    """

    def __init__(self, replicas: int, *, seed: int) -> None:
        super().__init__(replicas)
        self._chooser = random.Random(seed)

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Draw two and send to the less loaded."""
        drawn = self._chooser.sample(list(healthy), min(2, len(healthy)))
        replica = self.in_flight.least(drawn)
        self.in_flight.sent(asked.id, replica)
        return replica


class RoundRobin(CountingRule):
    """One after the other: vllm-router 0.1.17, `src/policies/round_robin.rs`."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._picks = 0

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the next one."""
        replica = healthy[self._picks % len(healthy)]
        self._picks += 1
        self.in_flight.sent(asked.id, replica)
        return replica


class LeastLoaded(CountingRule):
    """The fewest requests in flight, equal ones in turn: as nginx's `least_conn` does.

    nginx, `ngx_http_upstream_module`, directive `least_conn`, servers of equal weight.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._replicas = replicas
        self._last = -1

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the least loaded that is next in turn."""
        replica = min(
            healthy,
            key=lambda each: (
                self.in_flight.requests[each],
                (each - self._last - 1) % self._replicas,
            ),
        )
        self._last = replica
        self.in_flight.sent(asked.id, replica)
        return replica


class ConsistentHash(CountingRule):
    """A ring of hashes: a session's next point on it, or that of a body without a session.

    vllm-router 0.1.17, `src/policies/consistent_hash.rs`, `docs/load_balancing/README.md`;
    where that replica is not healthy, the first healthy one.
    """

    def __init__(self, replicas: int, *, virtual_nodes: int = 160) -> None:
        """Give each replica this many points on the ring."""
        super().__init__(replicas)
        self._ring = sorted(
            (_hash(f"{replica}:{point}"), replica)
            for replica in range(replicas)
            for point in range(virtual_nodes)
        )

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the replica whose point is next."""
        at = bisect_left(self._ring, (_hash(_affinity(asked)), 0)) % len(self._ring)
        target = self._ring[at][1]
        replica = target if target in healthy else healthy[0]
        self.in_flight.sent(asked.id, replica)
        return replica


class StickyLeastLoaded(CountingRule):
    """A new session goes to the replica with the fewest sessions, and stays there.

    vllm-router 0.1.17, `src/policies/sticky_least_loaded.rs`: load is the sessions that were
    heard of within `ttl_s`; equal load goes by rendezvous hashing. Its sweep for old ones
    comes once a minute at most.
    """

    def __init__(self, replicas: int, *, ttl_s: float = 7200.0, sweep_s: float = 60.0) -> None:
        """Forget sessions after `ttl_s`, seen to every `sweep_s`."""
        super().__init__(replicas)
        self.sessions = [0] * replicas
        self._ttl_s = ttl_s
        self._sweep_s = sweep_s
        self._swept_s = 0.0
        self._homes: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Replica and last request of each session, longest unheard of first."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send to the session's replica, or to the one with the fewest sessions."""
        self._sweep(now_s)
        replica = self._home(asked.session, healthy, now_s)
        if replica is None:
            replica = self._fewest(_affinity(asked), healthy)
        if asked.session is not None:
            self._homes[asked.session] = (replica, now_s)
            self.sessions[replica] += 1
        self.in_flight.sent(asked.id, replica)
        return replica

    def _home(self, session: str | None, healthy: Sequence[int], now_s: float) -> int | None:
        """Return the replica that a session can stay with, and take the session out."""
        if session is None or session not in self._homes:
            return None
        replica, heard_s = self._homes.pop(session)
        self.sessions[replica] -= 1
        return replica if replica in healthy and now_s - heard_s < self._ttl_s else None

    def _fewest(self, key: str, healthy: Sequence[int]) -> int:
        return min(healthy, key=lambda each: (self.sessions[each], -_hash(f"{key}@{each}")))

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s < self._sweep_s:
            return
        self._swept_s = now_s
        while self._homes:
            session, (replica, heard_s) = next(iter(self._homes.items()))
            if now_s - heard_s < self._ttl_s:
                return
            del self._homes[session]
            self.sessions[replica] -= 1


def _affinity(asked: Asked) -> str:
    """Return what tells a request's session, or else its body."""
    if asked.session is not None:
        return asked.session
    return f"{asked.blocks[-1] if asked.blocks else ''}:{asked.prompt_tokens}"


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


SPLITS: Final = {8: (5, 6, 7)}
"""By the number of replicas, how many of them prefill."""
NON_CACHED_TOKENS: Final = 2_000
"""From how many on a prompt is prefilled elsewhere: the best of those tried in model time."""


def splits(
    replicas: int, block_tokens: int, seed: int, *, prefill_tokens_per_s: float
) -> dict[str, Callable[[], FixedSplit]]:
    """Return fixed splits of a fleet, by names such as ``llm-d-6+2``.

    `llm-d`: as its guide has it. `llm-d-2000`: with its decider by uncached tokens, and answers
    where their prefix is. `vllm-router`: the policies that its documentation recommends.
    """

    def affinity() -> LlmDAffinity:
        return LlmDAffinity(replicas, prefill_tokens_per_s=prefill_tokens_per_s)

    def llm_d(prefillers: int) -> FixedSplit:
        return FixedSplit(prefillers, prefill=affinity(), decode=LeastLoaded(replicas))

    def by_tokens(prefillers: int) -> FixedSplit:
        decode = LlmD(replicas)
        return FixedSplit(
            prefillers,
            prefill=affinity(),
            decode=decode,
            matched=decode.matched,
            non_cached_tokens=NON_CACHED_TOKENS,
        )

    def vllm_router(prefillers: int) -> FixedSplit:
        cache_aware = VllmCacheAware(replicas, block_tokens=block_tokens)
        decode = PowerOfTwo(replicas, seed=seed)
        return FixedSplit(prefillers, prefill=cache_aware, decode=decode)

    makers = {"llm-d": llm_d, "llm-d-2000": by_tokens, "vllm-router": vllm_router}
    return {
        f"{name}-{prefillers}+{replicas - prefillers}": partial(make, prefillers)
        for name, make in makers.items()
        for prefillers in SPLITS.get(replicas, ())
    }


def rules(
    replicas: int,
    block_tokens: int,
    kv_capacity_blocks: int,
    seed: int,
    *,
    prefill_tokens_per_s: float = 15928.0,
) -> dict[str, Callable[[], Rule]]:
    """Return how each contender's rule is made for a fleet, by its name.

    `seed` is that of draws and ties, `prefill_tokens_per_s` is the speed that `llm-d-affinity`
    assumes for the machine. No rule here goes by `kv_capacity_blocks`, the size of a replica's
    GPU cache.
    """
    tuned = partial(VllmCacheAware, cache_threshold=0.5, balance_abs=32, balance_rel=1.1)
    predicted = DynamoWeights(predicted_ttl_s=5.0)
    rate = prefill_tokens_per_s
    return {
        "sglang-cache-aware": partial(SglangCacheAware, replicas, block_tokens=block_tokens),
        "vllm-cache-aware": partial(VllmCacheAware, replicas, block_tokens=block_tokens),
        "vllm-cache-aware-tuned": partial(tuned, replicas, block_tokens=block_tokens),
        "vllm-kv-aware": partial(KvAware, replicas),
        "vllm-kv-aware-sessions": partial(KvAwareSessions, replicas),
        "power-of-two": partial(PowerOfTwo, replicas, seed=seed),
        "consistent-hash": partial(ConsistentHash, replicas),
        "sticky-least-loaded": partial(StickyLeastLoaded, replicas),
        "round-robin": partial(RoundRobin, replicas),
        "least-loaded": partial(LeastLoaded, replicas),
        "dynamo": partial(Dynamo, replicas, seed=seed),
        "dynamo-predicted": partial(Dynamo, replicas, seed=seed, weights=predicted),
        "llm-d": partial(LlmD, replicas),
        "llm-d-affinity": partial(LlmDAffinity, replicas, prefill_tokens_per_s=rate),
        "aibrix-prefix-cache": partial(Aibrix, replicas, seed=seed, block_tokens=block_tokens),
    }
