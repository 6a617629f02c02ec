"""The rules by the names of their contenders, and where they are not their original.

Each rule's docstring names its source. All of them: replicas that are equal are tried in
the order of their numbers where the original goes by its registry's order; prompts are
full blocks, so a match ends at a block where trees of characters end within one; bounds in
characters take 4 of them as a token, where the original does not fix it. What the originals
do beside picking (retries, circuit breakers) is the driver's, or left out; none queues
requests by default.

- `sglang-cache-aware`: a leaf of its tree is cut block by block, not whole; a prompt that
  ends within another one does not make that one more recent.
- `vllm-cache-aware`, `vllm-cache-aware-tuned`: the same. The page that recommends 0.5 / 32
  / 1.1 also lists a cut every 30 s and 10,000 nodes, which its command does not set.
- `vllm-kv-aware`: by the program, not its source: the rule is what 0.1.17 logs and does.
- `vllm-kv-aware-sessions`: no time to live is recommended for sessions; 3,600 s is what the
  router keeps sessions for elsewhere.
- `power-of-two`: load is the requests in flight; the loads that it could ask replicas for
  are left out, as vLLM counts for its `/load` only when told to.
- `consistent-hash`, `sticky-least-loaded`: other hash functions; a body without a session
  is known by its blocks and its length.
- `dynamo`: answers' blocks are not tracked (its default); requests that never end are not
  expired, since here all end. `dynamo-predicted` is the same with `predicted_ttl_s` of 5,
  as its documentation advises for bursts of equal prompts.
- `llm-d`: its bound of 10**8 blocks is beyond what the replicas hold; the driver scrapes.
  A speculative entry of a request ends with that request's 2 s even where a later request
  has the same blocks; here it lives on with the later one.
- `llm-d-affinity`: a contender of its own, since the filter is not to be combined with a
  weighted prefix score, says its documentation. The guides give the filter a guess from
  what was sent; here it has the KV events, as `llm-d` has. Requests are not expired after
  5 minutes, since here all end.
- `aibrix-prefix-cache`: blocks are the engine's, not 128 characters; the newest version
  asks for more before it calls the load uneven.
"""

from collections.abc import Callable
from functools import partial

from bench.discrete.rules.aibrix import Aibrix
from bench.discrete.rules.cache_aware import SglangCacheAware, VllmCacheAware
from bench.discrete.rules.dynamo import Dynamo, DynamoWeights
from bench.discrete.rules.kv_aware import KvAware, KvAwareSessions
from bench.discrete.rules.llm_d import LlmD, LlmDAffinity
from bench.discrete.rules.rule import Rule
from bench.discrete.rules.spread import (
    ConsistentHash,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    StickyLeastLoaded,
)


def rules(
    replicas: int,
    block_tokens: int,
    kv_capacity_blocks: int,
    seed: int,
    *,
    prefill_tokens_per_s: float = 15928.0,
) -> dict[str, Callable[[], Rule]]:
    """Return how each contender's rule is made for a fleet, by its name.

    `seed` is that of draws and ties, `prefill_tokens_per_s` what `llm-d-affinity` is told of
    the machine. No rule here goes by `kv_capacity_blocks`, the size of a replica's GPU cache.
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
