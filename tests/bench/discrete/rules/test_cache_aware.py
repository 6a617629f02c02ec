"""SGLang's and vLLM's cache-aware rules, by their published formulas."""

import pytest

from bench.discrete.rules.cache_aware import CacheAware, SglangCacheAware, VllmCacheAware
from tests.bench.discrete.rules.asking import BLOCK_TOKENS, Asking

BOTH = pytest.mark.parametrize("kind", [SglangCacheAware, VllmCacheAware])


def asking(kind: type[SglangCacheAware] | type[VllmCacheAware], replicas: int = 3) -> Asking:
    return Asking(kind(replicas, block_tokens=BLOCK_TOKENS), replicas)


def loads(fleet: Asking) -> list[int]:
    assert isinstance(fleet.rule, CacheAware)
    return fleet.rule.in_flight.requests


@BOTH
def test_a_known_prefix_draws_a_prompt_to_a_busier_replica(
    kind: type[SglangCacheAware] | type[VllmCacheAware],
) -> None:
    fleet = asking(kind)
    assert fleet.send([1, 2, 3, 4]) == 0
    fleet.load(0, 63)
    assert fleet.send([1, 2, 3, 4, 5]) == 0


@BOTH
def test_a_match_of_the_threshold_is_not_enough(
    kind: type[SglangCacheAware] | type[VllmCacheAware],
) -> None:
    """Three blocks of ten are 0.3 of them; it takes more."""
    fleet = asking(kind)
    fleet.send([1, 2, 3, 4])
    assert fleet.send([1, 2, 3, *fleet.new(7)]) == 1
    assert fleet.send([1, 2, 3, 4, *fleet.new(7)]) == 0


@BOTH
def test_uneven_load_takes_both_bounds(
    kind: type[SglangCacheAware] | type[VllmCacheAware],
) -> None:
    fleet = asking(kind, 2)
    fleet.send([1, 2])
    fleet.load(0, 63)
    assert loads(fleet) == [64, 0]
    # A difference of 64 is not more than 64.
    assert fleet.send([1, 2]) == 0
    assert fleet.send([1, 2]) == 1
    busy = asking(kind, 2)
    busy.send([1, 2])
    busy.load(0, 209)
    busy.load(1, 140)
    # 70 more, but not more than half as much again.
    assert busy.send([1, 2]) == 0
    busy.load(0)
    assert loads(busy) == [212, 140]
    assert busy.send([1, 2]) == 1


@BOTH
def test_a_prompt_that_went_elsewhere_is_known_there_too(
    kind: type[SglangCacheAware] | type[VllmCacheAware],
) -> None:
    fleet = asking(kind, 2)
    fleet.send([1, 2])
    fleet.load(0, 64)
    assert fleet.send([1, 2, 3, 4, 5, 6]) == 1
    fleet.load(1, 30)
    assert fleet.send([1, 2, 3, 4, 5, 6]) == 1


@BOTH
def test_a_cold_prompt_goes_to_the_first_of_the_least_loaded(
    kind: type[SglangCacheAware] | type[VllmCacheAware],
) -> None:
    fleet = asking(kind)
    fleet.load(0)
    assert [fleet.send(fleet.new()) for _ in range(3)] == [1, 2, 0]


def test_sglang_sends_a_shared_prefix_to_where_it_was_first() -> None:
    fleet = asking(SglangCacheAware)
    fleet.healthy = [2]
    fleet.send([1, 2])
    fleet.healthy = [0, 1, 2]
    fleet.load(2, 70)
    assert fleet.send([1, 2]) == 0
    fleet.load(0, 30)
    fleet.load(1, 30)
    assert fleet.send([1, 2]) == 2


def test_sglang_sends_to_the_first_healthy_one_where_the_owner_is_not() -> None:
    fleet = asking(SglangCacheAware)
    fleet.healthy = [2]
    fleet.send([1, 2])
    fleet.healthy = [0, 1]
    fleet.load(0)
    assert fleet.send([1, 2]) == 0


def test_vllm_sends_to_the_least_loaded_of_the_best_matches() -> None:
    fleet = asking(VllmCacheAware)
    for replica in (1, 2):
        fleet.healthy = [replica]
        fleet.send([1, 2])
    fleet.healthy = [0, 1, 2]
    fleet.load(1)
    assert fleet.send([1, 2, 3]) == 2
    # Now one has all three blocks: the other's two do not count.
    fleet.load(2, 5)
    assert fleet.send([1, 2, 3]) == 2


def test_vllm_looks_at_healthy_replicas_only() -> None:
    fleet = asking(VllmCacheAware)
    fleet.send([1, 2])
    fleet.healthy = [1, 2]
    fleet.load(1)
    assert fleet.send([1, 2]) == 2


def test_the_tree_is_cut_when_its_interval_is_over() -> None:
    rule = SglangCacheAware(2, block_tokens=BLOCK_TOKENS, max_tree_tokens=2 * BLOCK_TOKENS)
    fleet = Asking(rule, 2)
    fleet.send([1, 2])
    fleet.load(0)
    fleet.load(0)
    fleet.now_s = 59.9
    assert fleet.send([1, 2]) == 0
    fleet.load(0, 2)
    fleet.now_s = 60.0
    assert fleet.send([1, 2]) == 1
