"""Which blocks of a prompt a replica has, by its events."""

from bench.discrete.rules.kv_aware import KvIndex, reach
from router.index.prompt_keys import KvTier


def test_a_run_ends_at_the_first_block_that_a_tier_does_not_have() -> None:
    index = KvIndex(2)
    index.stored(0, KvTier.GPU, [1, 2, 3])
    index.stored(1, KvTier.GPU, [1, 3, 4])
    index.removed(0, KvTier.GPU, [2])
    runs = index.runs([1, 2, 3, 4])
    assert reach(runs, index.bits(0, KvTier.GPU)) == 1
    assert reach(runs, index.bits(1, KvTier.GPU)) == 1


def test_a_lower_tier_goes_on_where_the_upper_one_ends() -> None:
    index = KvIndex(2)
    index.stored(1, KvTier.GPU, [1, 2])
    index.stored(1, KvTier.CPU, [2, 3, 4])
    index.stored(0, KvTier.DISK, [1, 2, 3, 4, 5])
    runs = index.runs([1, 2, 3, 4, 5])
    assert reach(runs, index.bits(1, KvTier.CPU)) == 0
    assert reach(runs, index.bits(1, KvTier.CPU), 2) == 4
    assert reach(runs, index.bits(0, KvTier.DISK)) == 5
    assert reach(runs, index.bits(0, KvTier.CPU), 3) == 3


def test_blocks_after_a_gap_count_only_where_that_is_asked_for() -> None:
    index = KvIndex(1)
    index.stored(0, KvTier.GPU, [3, 4])
    bit = index.bits(0, KvTier.GPU)
    assert index.runs([1, 2, 3, 4, 5]) == []
    assert reach(index.runs([1, 2, 3, 4, 5], at_least=2), bit, 2) == 4
    assert index.runs([]) == []


def test_a_restart_clears_all_tiers_of_one_replica() -> None:
    index = KvIndex(2)
    for tier in KvTier:
        index.stored(0, tier, [1, 2])
    index.stored(1, KvTier.CPU, [2])
    index.cleared(0)
    assert len(index) == 1
    assert reach(index.runs([2]), index.bits(1, KvTier.CPU)) == 1


def test_nothing_is_left_of_blocks_that_are_gone() -> None:
    index = KvIndex(2)
    index.stored(0, KvTier.GPU, range(100))
    index.stored(1, KvTier.REMOTE, range(100))
    index.removed(0, KvTier.GPU, range(100))
    index.removed(1, KvTier.REMOTE, range(200))
    assert len(index) == 0
