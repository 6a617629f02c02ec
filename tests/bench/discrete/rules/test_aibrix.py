"""AIBrix's rule: the best match that is not busier than a deviation over the mean."""

from collections import Counter

import pytest

from bench.discrete.rules.aibrix import Aibrix
from tests.bench.discrete.rules.asking import BLOCK_TOKENS, Asking


def asking(replicas: int = 3, *, max_tokens: int = 1_000_000, ttl_s: float = 1200.0) -> Asking:
    rule = Aibrix(replicas, seed=1, block_tokens=BLOCK_TOKENS, max_tokens=max_tokens, ttl_s=ttl_s)
    return Asking(rule, replicas)


def at(fleet: Asking, replica: int, blocks: list[int]) -> None:
    """Send a prompt to a replica, and end it."""
    fleet.healthy, healthy = [replica], fleet.healthy
    fleet.send(blocks)
    fleet.finish(fleet.last)
    fleet.healthy = healthy


def test_the_greatest_match_wins() -> None:
    fleet = asking()
    at(fleet, 1, [1, 2])
    at(fleet, 2, [1, 2, 3])
    assert fleet.send([1, 2, 3, 4]) == 2
    assert fleet.send([1, 2, 9]) == 1


def test_equal_matches_go_to_the_less_loaded() -> None:
    fleet = asking(4)
    for replica in (1, 2, 3):
        at(fleet, replica, [1, 2])
    fleet.load(1)
    fleet.load(3)
    for _ in range(10):
        assert fleet.send([1, 2]) == 2
        fleet.finish(fleet.last)


def test_matches_are_compared_by_whole_percents() -> None:
    """100 and 101 of 200 blocks are 50%; 102 are 51%."""
    fleet = asking(2)
    blocks = list(range(200))
    at(fleet, 0, blocks[:101])
    at(fleet, 1, blocks[:100])
    fleet.load(0)
    assert fleet.send(blocks) == 1
    fleet = asking(2)
    at(fleet, 0, blocks[:102])
    at(fleet, 1, blocks[:100])
    assert fleet.send(blocks) == 0


def test_a_match_that_is_busier_than_a_deviation_over_the_mean_is_left() -> None:
    """Loads of 4, 0 and 0 have a mean of 4/3 and a deviation of 1.9: 4 is too many, 2 is not."""
    fleet = asking()
    at(fleet, 0, [1, 2, 3])
    at(fleet, 1, [1])
    fleet.load(0, 4)
    assert fleet.send([1, 2, 3]) == 1
    fleet = asking()
    at(fleet, 0, [1, 2, 3])
    fleet.load(0, 3)
    fleet.load(1, 3)
    # A mean of 2 and a deviation of 1.4.
    assert fleet.send([1, 2, 3]) == 0


def test_uneven_load_goes_first() -> None:
    """A difference of 8 is even; at 9 the match is not asked for."""
    fleet = asking(2)
    at(fleet, 0, [1, 2])
    fleet.load(0, 8)
    # Even, and 8 is just the mean of 4 and the deviation of 4.
    assert fleet.send([1, 2]) == 0
    assert fleet.send([1, 2]) == 1


def test_cold_prompts_are_spread_by_chance_over_the_least_loaded() -> None:
    fleet = asking()
    fleet.load(0)
    picks = Counter(fleet.send(fleet.new()) for _ in range(8))
    assert picks == {0: 2, 1: 3, 2: 3}


def test_blocks_that_were_not_sent_for_long_are_forgotten() -> None:
    fleet = asking(2, ttl_s=100.0)
    at(fleet, 1, [1, 2, 3, 4])
    fleet.load(0)
    fleet.load(1, 2)
    fleet.now_s = 60.0
    at(fleet, 1, [1, 2])
    fleet.now_s = 101.0
    # Half of it is known yet, by its second sending.
    assert fleet.send([1, 2, 3, 4]) == 1
    fleet.now_s = 202.0
    assert fleet.send([1, 2, 3, 4]) == 0


@pytest.mark.parametrize(("max_blocks", "expected"), [(6, 1), (5, 0)])
def test_the_least_recently_sent_blocks_are_lost(max_blocks: int, expected: int) -> None:
    """Of six blocks in a table of five, the first one of the oldest prompt is gone."""
    fleet = asking(2, max_tokens=max_blocks * BLOCK_TOKENS)
    at(fleet, 1, [1, 2, 3])
    at(fleet, 1, [4, 5])
    fleet.load(1)
    assert fleet.send([1, 2, 3]) == expected
