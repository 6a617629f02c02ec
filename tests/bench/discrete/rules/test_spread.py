"""Rules by load, in turn, and by session."""

from collections import Counter

from bench.discrete.rules.catalogue import (
    ConsistentHash,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    StickyLeastLoaded,
)
from tests.bench.discrete.rules.asking import Asking


def test_of_two_the_less_loaded_is_taken() -> None:
    """With two replicas both are drawn each time: the load stays even."""
    fleet = Asking(PowerOfTwo(2, seed=1), 2)
    fleet.load(0, 10)
    assert [fleet.send() for _ in range(10)] == [1] * 10


def test_the_most_loaded_of_three_is_never_taken() -> None:
    fleet = Asking(PowerOfTwo(3, seed=1), 3)
    fleet.load(2, 100)
    picks = Counter(fleet.send() for _ in range(60))
    assert picks[2] == 0
    assert abs(picks[0] - picks[1]) < 10
    fleet.healthy = [1]
    assert fleet.send() == 1


def test_turns_go_round_the_healthy() -> None:
    fleet = Asking(RoundRobin(3), 3)
    assert [fleet.send() for _ in range(4)] == [0, 1, 2, 0]
    fleet.healthy = [0, 2]
    assert [fleet.send() for _ in range(3)] == [0, 2, 0]


def test_the_least_loaded_are_taken_in_turn() -> None:
    fleet = Asking(LeastLoaded(3), 3)
    assert [fleet.send() for _ in range(3)] == [0, 1, 2]
    fleet.finish(0)
    fleet.finish(1)
    fleet.finish(2)
    fleet.load(1)
    assert [fleet.send() for _ in range(4)] == [2, 0, 1, 2]


def test_a_session_has_its_place_on_the_ring() -> None:
    fleet = Asking(ConsistentHash(4), 4)
    homes = {name: fleet.send(fleet.new(), session=name) for name in map(str, range(200))}
    assert homes == {name: fleet.send(fleet.new(), session=name) for name in homes}
    assert min(Counter(homes.values()).values()) > 25
    name = next(each for each, home in homes.items() if home == 2)
    fleet.healthy = [1, 3]
    assert fleet.send(session=name) == 1


def test_a_replica_more_moves_few_sessions() -> None:
    few, more = Asking(ConsistentHash(7), 7), Asking(ConsistentHash(8), 8)
    moved = [few.send(session=str(name)) != more.send(session=str(name)) for name in range(400)]
    assert sum(moved) < 400 * 2 / 8


def test_a_body_without_a_session_is_hashed_whole() -> None:
    fleet = Asking(ConsistentHash(8), 8)
    assert len({fleet.send([1, 2, 3]) for _ in range(5)}) == 1
    assert len({fleet.send([1, 2, each]) for each in range(3, 60)}) == 8


def test_a_new_session_goes_where_the_fewest_are() -> None:
    fleet = Asking(StickyLeastLoaded(3), 3)
    homes = [fleet.send(session=name) for name in "abcdef"]
    assert Counter(homes) == {0: 2, 1: 2, 2: 2}
    # Requests in flight do not count, sessions do.
    fleet.load(homes[0], 50)
    assert [fleet.send(session=name) for name in "abcdef"] == homes


def test_a_session_moves_from_a_replica_that_is_not_healthy() -> None:
    fleet = Asking(StickyLeastLoaded(2), 2)
    home = fleet.send(session="a")
    fleet.healthy = [1 - home]
    assert fleet.send(session="a") == 1 - home
    fleet.healthy = [0, 1]
    assert fleet.send(session="a") == 1 - home


def test_a_session_that_was_not_heard_of_counts_no_more() -> None:
    rule = StickyLeastLoaded(2, ttl_s=100.0, sweep_s=10.0)
    fleet = Asking(rule, 2)
    for name in "abcd":
        fleet.send(session=name)
    fleet.now_s = 60.0
    fleet.send(session="a")
    assert sum(rule.sessions) == 4
    fleet.now_s = 120.0
    fleet.send()
    assert sum(rule.sessions) == 1
    fleet.now_s = 159.0
    fleet.send(session="a")
    assert sum(rule.sessions) == 1
