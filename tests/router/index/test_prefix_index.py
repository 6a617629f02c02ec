"""The matches that the index must get right, and what it forgets, evicts and expires."""

import random

import pytest

from router.index.holders import Depth, Holders, slots
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import ChunkRun, KvTier, Match, keys64
from tests.router.index.helpers import CHAIN, check_depths
from warmroute_common.keys import HashScheme, key64


def test_lower_tiers_go_on_from_the_chunk_that_holds_the_end_of_the_gpu_blocks() -> None:
    """Only the part that the GPU lacks counts of the first chunk from a lower tier."""
    index = PrefixIndex(1000)
    keys = list(range(16))
    index.add(0, KvTier.GPU, keys[:6])
    index.add(0, KvTier.CPU, [keys[7]])
    index.add(0, KvTier.DISK, [keys[11], keys[15]])
    found = index.match(0, keys, blocks_per_chunk=4)
    assert found == Match(6, (ChunkRun(KvTier.CPU, 1, 2), ChunkRun(KvTier.DISK, 2, 4)))
    assert found.tokens(16, 4) == {KvTier.GPU: 96, KvTier.CPU: 32, KvTier.DISK: 128}


def test_a_missing_chunk_ends_the_match() -> None:
    index = PrefixIndex(1000)
    keys = list(range(12))
    index.add(0, KvTier.CPU, [keys[3], keys[11]])
    assert index.match(0, keys, blocks_per_chunk=4).runs == (ChunkRun(KvTier.CPU, 0, 1),)


def test_without_the_chunk_that_holds_the_gpus_end_later_ones_are_worth_nothing() -> None:
    index = PrefixIndex(1000)
    keys = list(range(12))
    index.add(0, KvTier.GPU, keys[:5])
    index.add(0, KvTier.CPU, [keys[3], keys[11]])
    assert index.match(0, keys, blocks_per_chunk=4) == Match(5)


def test_the_fastest_tier_of_a_chunk_counts() -> None:
    index = PrefixIndex(1000)
    keys = list(range(4))
    index.add(0, KvTier.REMOTE, keys)
    index.add(0, KvTier.DISK, keys[:3])
    index.add(0, KvTier.CPU, keys[1:2])
    assert [run.tier for run in index.match(0, keys).runs] == [
        KvTier.DISK,
        KvTier.CPU,
        KvTier.DISK,
        KvTier.REMOTE,
    ]


def test_the_second_copy_of_a_block_outlives_the_first() -> None:
    """vLLM reports every physical copy stored and removed."""
    index = PrefixIndex(1000)
    index.add(0, KvTier.GPU, [1], counted=True)
    index.add(0, KvTier.GPU, [1], counted=True)
    index.remove(0, KvTier.GPU, [1])
    assert index.match(0, [1]).gpu_blocks == 1
    index.remove(0, KvTier.GPU, [1])
    assert index.match(0, [1]).gpu_blocks == 0


def test_claims_are_evicted_before_what_is_known() -> None:
    index = PrefixIndex(10)
    index.add(0, KvTier.GPU, range(8))
    index.believe(1, [100, 101], until_s=9.0)
    index.add(0, KvTier.GPU, [8])
    assert index.match(1, [100, 101]).gpu_blocks == 0
    assert index.held(0) == {KvTier.GPU: 9}
    assert index.evicted == 2


def test_the_end_of_a_chain_of_the_largest_holding_is_evicted() -> None:
    index = PrefixIndex(10)
    index.add(0, KvTier.GPU, range(7))
    index.add(1, KvTier.CPU, range(3))
    index.add(1, KvTier.CPU, [3])
    assert index.held(1) == {KvTier.CPU: 4}
    assert index.match(0, range(7)).gpu_blocks == 6
    assert index.evicted == 1


SYSTEM = list(range(64))


def session(number: int) -> list[int]:
    """Return the keys of a prompt of 164 blocks after a common system prompt."""
    return [*SYSTEM, *(1_000 * number + at for at in range(100))]


def store(index: PrefixIndex, replica: int, keys: list[int]) -> None:
    """Report a prompt as vLLM does: what is new of it, in messages of some blocks each."""
    new = index.match(replica, keys).gpu_blocks
    for at in range(new, len(keys), 20):
        parent = keys[at - 1] if at else None
        index.add(replica, KvTier.GPU, keys[at : at + 20], parent=parent, counted=True)


@pytest.mark.parametrize("max_keys", [4_000, 3_000, 1_000])
def test_a_full_index_matches_all_that_it_keeps(max_keys: int) -> None:
    """Without its beginning, what is known of a prompt is useless: so ends go first."""
    index = PrefixIndex(max_keys)
    for number in range(1, 11):
        for replica in range(4):
            store(index, replica, session(number))
    assert index.evicted >= 4 * 1_064 - max_keys
    index.check()
    for replica in range(4):
        found = [index.match(replica, session(number)).gpu_blocks for number in range(1, 11)]
        assert min(found) >= len(SYSTEM)
        matched = len(SYSTEM) + sum(blocks - len(SYSTEM) for blocks in found)
        assert matched == index.held(replica)[KvTier.GPU]


def test_what_was_not_used_for_longest_is_evicted_first() -> None:
    index = PrefixIndex(468)
    for number in (1, 2, 3, 4):
        store(index, 0, session(number))
    index.add(1, KvTier.CPU, [1, 2])
    index.add(1, KvTier.CPU, [3, 4])
    index.use(1, [], [1, 2, 5])
    index.use(0, session(1), [])
    index.use(0, [*session(3), 7], [])
    for key in range(10_000, 10_090):
        index.add(0, KvTier.GPU, [key], parent=session(1)[-1])
    found = [index.match(0, session(number)).gpu_blocks for number in (1, 2, 3, 4)]
    assert found[0] == 164
    assert found[1] < found[2] == found[3] == 164
    assert list(index._held[1][KvTier.CPU]) == [1, 3, 4, 2]


def test_keys_that_lead_in_a_circle_are_evicted_too() -> None:
    """Keys that an agent tells together need not follow each other."""
    index = PrefixIndex(4)
    index.add(0, KvTier.CPU, [1, 2])
    index.remove(0, KvTier.CPU, [1])
    index.add(0, KvTier.CPU, [2, 1])
    index.add(0, KvTier.CPU, [3, 3, 4])
    index.add(0, KvTier.CPU, [5], parent=5)
    index.check()
    index.add(0, KvTier.CPU, [6], parent=1)
    index.check()
    assert index.evicted == 2


def test_a_copy_of_an_evicted_key_is_forgotten_with_it() -> None:
    index = PrefixIndex(3)
    index.add(0, KvTier.GPU, [1, 2, 3], counted=True)
    index.add(0, KvTier.GPU, [3], parent=2, counted=True)
    index.add(0, KvTier.GPU, [4], parent=2, counted=True)
    index.check()
    index.add(0, KvTier.GPU, [3], parent=2, counted=True)
    index.remove(0, KvTier.GPU, [3])
    assert index.match(0, [1, 2, 3]).gpu_blocks == 2


def test_a_withdrawn_claim_leaves_what_a_later_one_claims() -> None:
    index = PrefixIndex(100)
    first = index.believe(0, [1, 2, 3], until_s=5.0)
    index.believe(0, [1, 2], until_s=6.0)
    index.withdraw(first)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 2
    index.check()


def test_a_withdrawn_claim_leaves_what_an_earlier_one_claimed() -> None:
    index = PrefixIndex(100)
    first = index.believe(0, [1, 2], until_s=5.0)
    second = index.believe(0, [1, 2, 3], until_s=6.0)
    index.withdraw(second)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 2
    index.check()
    third = index.believe(0, [1], until_s=7.0)
    index.withdraw(first)
    index.withdraw(third)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 0
    index.check()


def test_a_claim_of_what_is_known_takes_no_room() -> None:
    index = PrefixIndex(100)
    index.add(0, KvTier.GPU, [1, 2])
    for _ in range(1000):
        index.withdraw(index.believe(0, [1, 2], until_s=5.0))
    assert not index._claims._by_end


def test_expiring_ends_whole_claims_of_as_many_keys_as_it_may() -> None:
    index = PrefixIndex(100)
    for key in range(3):
        index.believe(0, [key], until_s=1.0)
    index.expire(1.0, max_keys=14)
    assert len(index) == 1


def test_keys64_are_the_low_64_bits_of_digests_of_any_scheme() -> None:
    for algorithm in ("sha256", "xxhash"):
        chain = HashScheme(algorithm).chain(range(64), 16)
        assert keys64(chain) == [key64(key) for key in chain]
    assert keys64([]) == []


def test_replicas_that_match_equally_deep_are_one_group() -> None:
    index = PrefixIndex(1000)
    keys = list(range(8))
    for replica in (0, 5, 900):
        index.add(replica, KvTier.GPU, keys[:6])
    index.add(5, KvTier.DISK, [keys[3], keys[7]])
    index.add(7, KvTier.DISK, [keys[3], keys[7]])
    everyone = (1 << 1000) - 1
    assert index.depths(keys, 4, everyone) == [
        Depth(1 << 5, 6, 8),
        Depth(1 << 7, 0, 8),
        Depth(1 << 0 | 1 << 900, 6, 6),
    ]
    assert index.depths(keys, 4, 1 << 900) == [Depth(1 << 900, 6, 6)]
    assert index.depths([9, *keys], 4, everyone) == []


@pytest.mark.parametrize("replicas", [3, 60])
def test_replicas_that_end_at_different_depths_are_told_apart(replicas: int) -> None:
    index = PrefixIndex(10_000)
    for replica in range(replicas):
        index.add(replica, KvTier.GPU, CHAIN[: replica * 7 % 24])
        index.add(replica, KvTier.CPU, CHAIN[: replica * 5 % 23])
    check_depths(index, CHAIN, 1, 2**replicas - 1)
    check_depths(index, CHAIN, 4, 2**replicas - 1)


def test_what_is_forgotten_counts_no_more_before_it_is_swept() -> None:
    index = PrefixIndex(1000)
    keys = list(range(25))
    index.add(0, KvTier.GPU, keys)
    index.add(1, KvTier.GPU, keys[:5])
    index.forget(0)
    assert index.depths(keys, 1, 0b11) == [Depth(0b10, 5, 5)]
    index.add(0, KvTier.GPU, keys[:3])
    for _ in range(3):
        assert index.depths(keys, 1, 0b11) == [Depth(0b10, 5, 5), Depth(0b01, 3, 3)]
        index.sweep(10)
        index.check()
    assert len(index) == 8


def test_no_holding_is_evicted_whole_while_others_are_as_large() -> None:
    index = PrefixIndex(16_000)
    for replica in range(160):
        index.add(replica, KvTier.GPU, range(100))
    index.add(0, KvTier.GPU, [100])
    assert min(index.held(replica)[KvTier.GPU] for replica in range(160)) >= 100 - 100 // 8 - 1
    assert index.evicted == 63


def test_slots_are_those_of_the_bits_few_or_many() -> None:
    for replicas in ([], [0], [999], [3, 64, 999], list(range(1000)), list(range(0, 1000, 7))):
        assert slots(sum(1 << replica for replica in replicas)) == replicas


def test_no_dictionary_has_more_than_a_small_part_of_a_fleets_keys() -> None:
    """A dictionary that grows is copied as a whole: with 4 million keys that took 0.3 s."""
    chance = random.Random(1)
    holders, keys = Holders(), [chance.getrandbits(64) for _ in range(50_000)]
    holders.add(0, keys)
    holders.add(3, keys[:10_000])
    holders.discard(0, keys[5_000:20_000])
    assert len(holders) == 40_000
    assert max(map(len, holders._parts)) < 40_000 / 100
    expected = dict.fromkeys(keys[:10_000], 0b1001) | dict.fromkeys(keys[5_000:10_000], 0b1000)
    expected |= dict.fromkeys(keys[20_000:], 1)
    holders.check(expected, stale=0)
    assert list(holders.of(keys)) == [expected.get(key, 0) for key in keys]
