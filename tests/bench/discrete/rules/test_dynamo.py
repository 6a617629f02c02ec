"""Dynamo's cost: prefill blocks to do, active ones and new ones, and blocks of decodes."""

import pytest

from bench.discrete.rules.kv_aware import Dynamo, DynamoWeights
from router.index.prompt_keys import KvTier
from tests.bench.discrete.rules.asking import Asking


def prefill(fleet: Asking) -> list[int]:
    assert isinstance(fleet.rule, Dynamo)
    return fleet.rule.in_flight.prefill_tokens


def decode_blocks(fleet: Asking) -> list[int]:
    assert isinstance(fleet.rule, Dynamo)
    return [each.blocks for each in fleet.rule.active]


def asking(replicas: int = 2, weights: DynamoWeights | None = None) -> Asking:
    return Asking(Dynamo(replicas, seed=1, weights=weights), replicas)


@pytest.mark.parametrize(
    ("tier", "credit"),
    [(KvTier.GPU, 10.0), (KvTier.CPU, 7.5), (KvTier.DISK, 2.5), (KvTier.REMOTE, 2.5)],
)
def test_a_block_counts_by_its_tier(tier: KvTier, credit: float) -> None:
    fleet = asking(1)
    blocks = fleet.new(10)
    fleet.rule.stored(0, tier, blocks)
    fleet.send(blocks, more_tokens=4)
    assert prefill(fleet) == [104 - credit * 10]


def test_tiers_are_a_chain_from_the_device_down() -> None:
    """Four on the device, three after them on the host, two after these on disk."""
    fleet = asking(1)
    blocks = fleet.new(10)
    fleet.rule.stored(0, KvTier.GPU, blocks[:4])
    fleet.rule.stored(0, KvTier.CPU, blocks[2:7])
    fleet.rule.stored(0, KvTier.DISK, blocks[7:9])
    fleet.send(blocks)
    # 4 + 3 x 0.75 + 2 x 0.25 blocks are 67.5 tokens, rounded up.
    assert prefill(fleet) == [100 - 68]


def test_the_least_cost_is_prefill_and_decode_blocks_together() -> None:
    """The cached 10 of 12 blocks are worth as much as 10 blocks of decodes elsewhere."""
    for others, expected in ((9, 0), (11, 1)):
        fleet = asking()
        blocks = fleet.new(12)
        fleet.rule.stored(0, KvTier.GPU, blocks[:10])
        fleet.load(0, others)
        for request in range(others):
            fleet.rule.first_token(request, 0.0)
        assert decode_blocks(fleet) == [others, 0]
        assert fleet.send(blocks) == expected


def test_prefill_in_flight_counts_until_the_first_token() -> None:
    fleet = asking()
    fleet.healthy = [0]
    fleet.send(fleet.new(5))
    fleet.healthy = [0, 1]
    blocks = fleet.new(8)
    fleet.rule.stored(0, KvTier.GPU, blocks)
    # 5 + 5 + 8 blocks against 8 + 8.
    assert fleet.send(blocks) == 1
    fleet.finish(fleet.last)
    fleet.rule.first_token(0, 1.0)
    assert fleet.send(blocks) == 0


def test_blocks_that_prompts_in_flight_share_count_once() -> None:
    fleet = asking(1)
    fleet.send([1, 2, 3])
    fleet.send([1, 2, 4, 5])
    assert decode_blocks(fleet) == [5]
    fleet.finish(0)
    assert decode_blocks(fleet) == [4]
    fleet.finish(1)
    assert decode_blocks(fleet) == [0]


def test_a_prompt_in_flight_draws_one_that_shares_its_blocks() -> None:
    """Both have one prompt of six blocks being decoded; those of replica 1 are shared."""
    fleet = asking()
    fleet.healthy = [1]
    fleet.send([1, 2, 3, 4, 5, 6])
    fleet.healthy = [0]
    fleet.send([11, 12, 13, 14, 15, 16])
    fleet.healthy = [0, 1]
    for request in (0, 1):
        fleet.rule.first_token(request, 1.0)
    assert fleet.send([1, 2, 3, 4, 5, 6, 7]) == 1


def test_equal_costs_are_drawn_by_chance() -> None:
    picks = []
    for _ in range(2):
        fleet = asking(4)
        run = []
        for _ in range(40):
            run.append(fleet.send(fleet.new()))
            fleet.finish(fleet.last)
        picks.append(run)
    assert picks[0] == picks[1]
    assert set(picks[0]) == {0, 1, 2, 3}


def test_active_requests_count_where_they_have_a_weight() -> None:
    fleet = asking(2, DynamoWeights(decode_active_requests=5.0))
    fleet.load(0)
    fleet.rule.first_token(0, 1.0)
    blocks = fleet.new(3)
    fleet.rule.stored(0, KvTier.GPU, blocks)
    # 1 + 3 + 5 blocks against 3 + 3.
    assert fleet.send(blocks) == 1


def test_what_was_sent_is_taken_as_held_for_some_seconds() -> None:
    fleet = asking(2, DynamoWeights(predicted_ttl_s=5.0))
    blocks = fleet.new(10)
    fleet.healthy = [1]
    fleet.send(blocks)
    fleet.rule.first_token(0, 0.0)
    fleet.finish(0)
    fleet.healthy = [0, 1]
    fleet.now_s = 4.9
    assert fleet.send(blocks, more_tokens=1) == 1
    assert prefill(fleet) == [0, 1]
    fleet.finish(1)
    fleet.now_s = 9.9
    fleet.healthy = [1]
    fleet.send(blocks)
    assert prefill(fleet) == [0, 100]
