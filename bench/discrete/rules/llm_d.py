"""llm-d's rules by KV events: weighted scores, and the filter for a prompt's affinity."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.discrete.rules.kv_aware import KvInformedRule, Runs
from bench.discrete.rules.rule import Asked, Expectations, ReplicaMetrics
from router.index.prompt_keys import KvTier

CPU_CREDIT: Final = 0.8
"""What a block in CPU memory counts for; any other counts for 1 (`pkg/kvcache/backend.go`)."""
SPECULATIVE_S: Final = 2.0
"""How long a request's blocks are taken as held where it was sent."""


class PrecisePrefixRule(KvInformedRule):
    """The common part: matches by KV events of any tier, and by what was sent just now.

    llm-d, `guides/precise-prefix-cache-routing`; llm-d-kv-cache, `pkg/kvcache`,
    `kvblock_scorer.go`: the blocks without a gap from the first on, whatever tier each is
    in, by the best of its tiers. What was sent within `SPECULATIVE_S` counts as held.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._expectations = Expectations(replicas, SPECULATIVE_S)
        self._picks = 0

    def _matches(self, asked: Asked, healthy: Sequence[int], now_s: float) -> dict[int, int]:
        """Return how many of a prompt's blocks each replica has, by weight, rounded down."""
        self._expectations.expire(now_s)
        expected = {each: self._expectations.depth(each, asked.blocks) for each in healthy}
        runs = self.index.runs(asked.blocks, max(expected.values()))
        return {each: self._match(runs, each, expected[each]) for each in healthy}

    def _match(self, runs: Runs, replica: int, expected: int) -> int:
        full = self.index.bits(replica, KvTier.GPU, KvTier.DISK, KvTier.REMOTE)
        cpu = self.index.bits(replica, KvTier.CPU)
        weight, at = float(expected), expected
        for mask, end in runs:
            if end > at:
                if not mask & (full | cpu):
                    break
                weight += (end - at) * (1.0 if mask & full else CPU_CREDIT)
                at = end
        return int(weight)

    def matched(self, asked: Asked, replica: int, now_s: float) -> int:
        """Return how many of a prompt's blocks a replica has, by weight."""
        return self._matches(asked, [replica], now_s)[replica]

    def _best(self, scores: Mapping[int, float]) -> int:
        """Return the replica with the greatest score, equal ones in turn."""
        most = max(scores.values())
        tied = [each for each, score in scores.items() if score == most]
        self._picks += 1
        return tied[(self._picks - 1) % len(tied)]

    def _send(self, asked: Asked, replica: int, match: int, now_s: float) -> None:
        self._expectations.sent(replica, asked.blocks, now_s)
        uncached_tokens = asked.prompt_tokens - match * asked.block_tokens
        self.in_flight.sent(asked.id, replica, uncached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmDWeights:
    """Weights of the scorers, as the guide sets them."""

    prefix: float = 3.0
    queue: float = 2.0
    kv_utilization: float = 2.0
    no_hit_lru: float = 2.0


class LlmD(PrecisePrefixRule):
    """The greatest weighted sum of four scores from 0 to 1.

    llm-d, `guides/precise-prefix-cache-routing`, its router's values; llm-d router,
    `pkg/epp/framework/plugins/scheduling/scorer`. By share of the prompt that is held; by
    queue, from the longest (0) to the shortest (1); by the free share of the KV cache; and
    a prompt that nobody has any block of by how long ago a replica was last sent such one.
    """

    def __init__(self, replicas: int, *, weights: LlmDWeights | None = None) -> None:
        """Take the guide's weights."""
        super().__init__(replicas)
        self._weights = weights or LlmDWeights()
        self._metrics: dict[int, ReplicaMetrics] = {}
        self._cold: OrderedDict[int, None] = OrderedDict()
        """Replicas that were sent a prompt nobody had, least recent first."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to the greatest score."""
        matches = self._matches(asked, healthy, now_s)
        is_cold = not any(matches.values())
        lru = self._no_hit_lru(healthy) if is_cold else dict.fromkeys(healthy, 0.5)
        queue, weights = self._queue(healthy), self._weights
        scores = {
            each: weights.prefix * matches[each] / max(len(asked.blocks), 1)
            + weights.queue * queue.get(each, 0.0)
            + weights.kv_utilization * self._free(each)
            + weights.no_hit_lru * lru[each]
            for each in healthy
        }
        replica = self._best(scores)
        if is_cold:
            self._cold[replica] = None
            self._cold.move_to_end(replica)
        self._send(asked, replica, matches[replica], now_s)
        return replica

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Note a replica's queue, and how full its KV cache is."""
        self._metrics[replica] = metrics

    def _queue(self, healthy: Sequence[int]) -> dict[int, float]:
        """Return scores of the replicas whose queue is known."""
        queues = {each: self._metrics[each].waiting for each in healthy if each in self._metrics}
        if len(set(queues.values())) <= 1:
            return dict.fromkeys(queues, 1.0)
        most, least = max(queues.values()), min(queues.values())
        return {each: (most - queue) / (most - least) for each, queue in queues.items()}

    def _free(self, replica: int) -> float:
        metrics = self._metrics.get(replica)
        return 0.0 if metrics is None else 1.0 - metrics.kv_used

    def _no_hit_lru(self, healthy: Sequence[int]) -> dict[int, float]:
        """Return scores by age: replicas never used so first, then the least recent."""
        never = [each for each in healthy if each not in self._cold]
        order = [*never, *(each for each in self._cold if each in healthy)]
        last = max(len(order) - 1, 1)
        return {each: 1.0 - rank / last for rank, each in enumerate(order)}


class LlmDAffinity(PrecisePrefixRule):
    """Replicas that have most of the prompt, unless they are far behind; then least tokens.

    llm-d, `guides/agentic-serving` and `guides/optimized-baseline`: the plugins
    `prefix-cache-affinity-filter` and `token-load-scorer`. A replica's wait is its uncached
    tokens in flight over the rate of prefill. Where the least wait of those with the prompt
    is longer than that of the others by more than `max_penalty_s`, all are scored.
    """

    def __init__(
        self,
        replicas: int,
        *,
        prefill_tokens_per_s: float = 15928.0,
        affinity_threshold: float = 0.8,
        max_penalty_s: float = 18.0,
        full_load_tokens: int = 4_194_304,
    ) -> None:
        """Take the plugins' defaults.

        The plugin's guide says to measure `prefill_tokens_per_s` on the machine; a
        load over `full_load_tokens` is scored as that.
        """
        super().__init__(replicas)
        self._rate = prefill_tokens_per_s
        self._threshold = affinity_threshold
        self._max_penalty_s = max_penalty_s
        self._full_load_tokens = full_load_tokens

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to the least load of the replicas that the filter leaves."""
        matches = self._matches(asked, healthy, now_s)
        left = self._filter(asked, healthy, matches)
        replica = self._best({each: self._score(asked, each, matches[each]) for each in left})
        self._send(asked, replica, matches[replica], now_s)
        return replica

    def _filter(
        self, asked: Asked, healthy: Sequence[int], matches: Mapping[int, int]
    ) -> Sequence[int]:
        needed = self._threshold * max(len(asked.blocks), 1)
        sticky = [each for each in healthy if matches[each] >= needed]
        others = [each for each in healthy if matches[each] < needed]
        if not sticky or not others:
            return healthy
        penalty_s = self._least_wait_s(sticky) - self._least_wait_s(others)
        return healthy if penalty_s > self._max_penalty_s else sticky

    def _least_wait_s(self, replicas: Sequence[int]) -> float:
        return min(self.in_flight.prefill_tokens[each] for each in replicas) / self._rate

    def _score(self, asked: Asked, replica: int, match: int) -> float:
        uncached_tokens = asked.prompt_tokens - match * asked.block_tokens
        load_tokens = self.in_flight.prefill_tokens[replica] + uncached_tokens
        return 1.0 - min(load_tokens, self._full_load_tokens) / self._full_load_tokens
