"""llm-d's weighted scores, and its filter for affinity."""

import pytest

from bench.discrete.rules.llm_d import LlmD, LlmDAffinity, LlmDWeights
from bench.discrete.rules.rule import ReplicaMetrics
from router.index.prompt_keys import KvTier
from tests.bench.discrete.rules.asking import Asking

ONLY_PREFIX = LlmDWeights(queue=0.0, kv_utilization=0.0, no_hit_lru=0.0)


def asking(replicas: int = 2, weights: LlmDWeights | None = None) -> Asking:
    return Asking(LlmD(replicas, weights=weights), replicas)


def scrape(fleet: Asking, *metrics: tuple[int, float]) -> None:
    for replica, (waiting, kv_used) in enumerate(metrics):
        said = ReplicaMetrics(waiting=waiting, kv_used=kv_used)
        fleet.rule.scraped(replica, said, fleet.now_s)


@pytest.mark.parametrize(("kv_used", "expected"), [(0.74, 1), (0.76, 0)])
def test_half_a_prompt_is_worth_three_quarters_of_a_kv_cache(kv_used: float, expected: int) -> None:
    """3 x 1/2 against 2 x 3/4; no queue differs, and the prompt is not cold."""
    fleet = asking()
    scrape(fleet, (0, 0.0), (0, kv_used))
    blocks = fleet.new(10)
    fleet.rule.stored(1, KvTier.GPU, blocks[:5])
    assert fleet.send(blocks) == expected


@pytest.mark.parametrize(("cached", "expected"), [(4, 0), (5, 0), (6, 1)])
def test_queues_are_scored_from_the_longest_to_the_shortest(cached: int, expected: int) -> None:
    """Of queues of 0, 3 and 4, the second scores 2 x 1/4: 3/2 are needed to make up for it."""
    fleet = asking(3)
    scrape(fleet, (0, 0.0), (3, 0.0), (4, 0.0))
    blocks = fleet.new(10)
    fleet.rule.stored(1, KvTier.GPU, blocks[:cached])
    assert fleet.send(blocks) == expected


@pytest.mark.parametrize(("tier", "weight"), [(KvTier.GPU, 10), (KvTier.CPU, 8), (KvTier.DISK, 10)])
def test_only_cpu_memory_counts_for_less(tier: KvTier, weight: int) -> None:
    """Nine blocks on the other's GPU are less than ten anywhere but in CPU memory."""
    fleet = asking(weights=ONLY_PREFIX)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks[:9])
    fleet.rule.stored(1, tier, blocks)
    assert fleet.send(blocks) == (1 if weight > 9 else 0)


def test_blocks_count_across_tiers_up_to_the_first_gap() -> None:
    fleet = asking(weights=ONLY_PREFIX)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks[:5])
    fleet.rule.stored(1, KvTier.CPU, blocks[:3])
    fleet.rule.stored(1, KvTier.GPU, blocks[3:7])
    # 3 x 0.8 + 4 is 6, rounded down, and 6 is more than 5.
    assert fleet.send(blocks) == 1
    fleet.now_s = 2.0
    fleet.rule.removed(1, KvTier.GPU, blocks[4:5])
    # 3 x 0.8 + 1 is 3.
    assert fleet.send(blocks) == 0


def test_what_was_sent_counts_as_held_for_two_seconds() -> None:
    fleet = asking(3, ONLY_PREFIX)
    blocks = fleet.new(5)
    fleet.healthy = [2]
    fleet.send(blocks)
    fleet.healthy = [0, 1, 2]
    fleet.now_s = 1.9
    assert fleet.send([*blocks, *fleet.new()]) == 2
    fleet.now_s = 4.0
    # Equal scores go in turn, also for the prompt that was held.
    assert [fleet.send(fleet.new()) for _ in range(2)] == [2, 0]
    assert fleet.send(blocks) == 1


def test_cold_prompts_go_to_the_replica_that_had_none_for_the_longest() -> None:
    fleet = asking(3)
    scrape(fleet, (0, 0.0), (0, 0.0), (0, 0.0))
    assert [fleet.send(fleet.new()) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    warm = fleet.new(3)
    fleet.rule.stored(2, KvTier.GPU, warm)
    fleet.send(warm)
    # A prompt that is known does not count as a turn.
    assert fleet.send(fleet.new()) == 0


def test_a_replica_without_metrics_has_no_score_by_them() -> None:
    fleet = asking()
    fleet.rule.scraped(1, ReplicaMetrics(waiting=9, kv_used=0.5), 0.0)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks)
    # 3 against 2 x 1 (the only queue known) and 2 x 1/2: equal, and the first in turn.
    assert fleet.send(blocks) == 0
    fleet.rule.removed(0, KvTier.GPU, blocks[9:])
    fleet.now_s = 2.0
    assert fleet.send(blocks) == 1


def affinity(replicas: int = 2, rate: float = 10.0) -> Asking:
    return Asking(LlmDAffinity(replicas, prefill_tokens_per_s=rate), replicas)


@pytest.mark.parametrize(("cached", "expected"), [(8, 0), (7, 1)])
def test_four_fifths_of_a_prompt_keep_it(cached: int, expected: int) -> None:
    fleet = affinity()
    fleet.load(0, 10)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks[:cached])
    assert fleet.send(blocks) == expected


@pytest.mark.parametrize(("requests", "expected"), [(18, 0), (19, 1)])
def test_a_wait_longer_by_more_than_the_penalty_lets_it_go(requests: int, expected: int) -> None:
    """Each request is 10 tokens, a second of prefill; 18 s more are not too many."""
    fleet = affinity()
    fleet.load(0, requests)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks)
    assert fleet.send(blocks) == expected


def test_the_least_uncached_tokens_are_the_least_load() -> None:
    fleet = affinity(3)
    blocks = fleet.new(10)
    fleet.rule.stored(1, KvTier.GPU, blocks[:7])
    fleet.load(1, 2)
    # 100, 20 + 30, 100 tokens.
    assert fleet.send(blocks) == 1
    # Its blocks count as held there now: the filter keeps it.
    assert fleet.send(blocks) == 1
    fleet.rule.first_token(fleet.last, 0.0)
    assert isinstance(fleet.rule, LlmDAffinity)
    assert fleet.rule.in_flight.prefill_tokens == [0, 50, 0]
