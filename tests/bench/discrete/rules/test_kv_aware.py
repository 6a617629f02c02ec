"""vLLM router's rule by KV events: (prefill in flight + new) x (requests + 1)."""

import pytest

from bench.discrete.rules.kv_aware import KvAware, KvAwareSessions
from router.index.prompt_keys import KvTier
from tests.bench.discrete.rules.asking import Asking


def prefill(fleet: Asking) -> list[int]:
    assert isinstance(fleet.rule, KvAware)
    return fleet.rule.in_flight.prefill_tokens


def charged(tier: KvTier, *, gpu_blocks: int = 0, more_tokens: int = 5) -> int:
    """Return the new tokens of a prompt of 10 blocks that a replica has in a tier."""
    fleet = Asking(KvAware(1), 1)
    blocks = list(range(10))
    fleet.rule.stored(0, KvTier.GPU, blocks[:gpu_blocks])
    fleet.rule.stored(0, tier, blocks)
    fleet.send(blocks, more_tokens=more_tokens)
    return prefill(fleet)[0]


def test_a_block_counts_by_its_tier() -> None:
    assert charged(KvTier.GPU) == 5
    assert charged(KvTier.CPU) == 105 - 80
    assert charged(KvTier.REMOTE) == 105 - 60
    assert charged(KvTier.DISK) == 105 - 30
    assert charged(KvTier.CPU, gpu_blocks=4) == 105 - 40 - 48


def test_the_last_token_is_always_computed() -> None:
    """Of 10 full blocks on the GPU nine count there; the tenth is not in a lower tier."""
    assert charged(KvTier.GPU, more_tokens=0) == 10
    assert charged(KvTier.GPU, more_tokens=1) == 1
    fleet = Asking(KvAware(1, credits={KvTier.CPU: 1.0}), 1)
    fleet.rule.stored(0, KvTier.CPU, range(10))
    fleet.send(range(10))
    assert prefill(fleet) == [1]


def test_one_lower_tier_goes_on_from_the_gpu() -> None:
    """The longest run counts, however low; the better one of two that are as long."""
    fleet = Asking(KvAware(1), 1)
    blocks = list(range(10))
    fleet.rule.stored(0, KvTier.GPU, blocks[:2])
    fleet.rule.stored(0, KvTier.CPU, blocks[2:4])
    fleet.rule.stored(0, KvTier.DISK, blocks[2:8])
    fleet.send(blocks, more_tokens=5)
    assert prefill(fleet) == [105 - 20 - 18]
    fleet.finish(fleet.last)
    fleet.rule.stored(0, KvTier.CPU, blocks[4:8])
    fleet.send(blocks, more_tokens=5)
    assert prefill(fleet) == [105 - 20 - 48]


def test_a_lower_run_must_begin_where_the_gpu_ends() -> None:
    fleet = Asking(KvAware(1), 1)
    blocks = list(range(10))
    fleet.rule.stored(0, KvTier.CPU, blocks[1:])
    fleet.send(blocks, more_tokens=5)
    assert prefill(fleet) == [105]


@pytest.mark.parametrize(("more_tokens", "expected"), [(0, 0), (1, 1)])
def test_requests_in_flight_multiply_the_prefill(more_tokens: int, expected: int) -> None:
    """Two requests and 100 cached tokens: 3 x 50 is 150, and the first wins; 3 x 51 is not 151."""
    fleet = Asking(KvAware(2), 2)
    for _ in range(2):
        fleet.load(0)
        fleet.rule.first_token(fleet.last, 0.0)
    blocks = fleet.new(15)
    fleet.rule.stored(0, KvTier.GPU, blocks[:10])
    assert fleet.send(blocks, more_tokens=more_tokens) == expected


def test_prefill_is_released_with_the_first_token_and_the_request_at_its_end() -> None:
    fleet = Asking(KvAware(2), 2)
    assert fleet.send(fleet.new(3)) == 0
    assert fleet.send(fleet.new(2)) == 1
    assert prefill(fleet) == [30, 20]
    fleet.rule.first_token(0, 1.0)
    assert prefill(fleet) == [0, 20]
    # 10 x 2 before (20 + 10) x 2.
    assert fleet.send(fleet.new()) == 0
    fleet.finish(0)
    fleet.finish(1)
    fleet.finish(2)
    assert prefill(fleet) == [0, 0]
    assert fleet.send(fleet.new()) == 0


def test_a_session_stays_however_loaded_its_home_is() -> None:
    fleet = Asking(KvAwareSessions(2), 2)
    assert fleet.send(fleet.new(), session="a") == 0
    fleet.load(0, 50)
    assert fleet.send(fleet.new(), session="a") == 0
    assert fleet.send(fleet.new(), session="b") == 1
    assert fleet.send(fleet.new()) == 1


def test_a_session_moves_when_its_home_is_not_healthy_and_stays_there() -> None:
    fleet = Asking(KvAwareSessions(2), 2)
    assert fleet.send(fleet.new(), session="a") == 0
    fleet.healthy = [1]
    assert fleet.send(fleet.new(), session="a") == 1
    fleet.healthy = [0, 1]
    fleet.load(1, 5)
    assert fleet.send(fleet.new(), session="a") == 1


def test_a_session_is_forgotten_when_it_was_idle_for_long() -> None:
    """The time runs from the end of the last request: one in flight keeps its session."""
    fleet = Asking(KvAwareSessions(2, ttl_s=100.0), 2)
    fleet.send(fleet.new(), session="a")
    fleet.load(0, 5)
    fleet.now_s = 1000.0
    assert fleet.send(fleet.new(), session="a") == 0
    fleet.finish(0)
    fleet.now_s = 1050.0
    fleet.finish(fleet.last)
    fleet.now_s = 1149.0
    assert fleet.send(fleet.new(), session="a") == 0
    fleet.finish(fleet.last)
    fleet.now_s = 1249.0
    assert fleet.send(fleet.new(), session="a") == 1
