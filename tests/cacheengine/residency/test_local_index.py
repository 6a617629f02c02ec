"""The lower tier's index, to exact outcomes."""

from cacheengine.residency.local_index import LocalIndex
from cacheengine.tiers.tier import GetOutcome
from tests.cacheengine.helpers import key, keys


def _tier(held: int, capacity: int = 3) -> LocalIndex:
    tier = LocalIndex(capacity * 10 + 5, 10, policy="LRU")
    for number in range(held):
        assert tier.reserve(key(number)) == []
        assert tier.publish(key(number))
    tier.check()
    return tier


def test_only_published_chunks_are_found() -> None:
    tier = _tier(0)
    tier.reserve(key(1))
    assert key(1) not in tier
    assert tier.is_known(key(1))
    assert tier.used_bytes == 10
    tier.publish(key(1))
    assert key(1) in tier


def test_a_full_tier_makes_room_by_the_least_recent() -> None:
    tier = _tier(3)
    tier.touch(key(0))
    assert tier.reserve(key(9)) == keys(1)
    assert key(1) not in tier
    assert tier.used_bytes == 30
    tier.check()
    tier.forget(key(1))
    tier.check()
    tier.publish(key(9))
    assert tier.keys() == keys(2, 0, 9)


def test_two_writers_at_once_each_replace_one() -> None:
    """The second must not evict once more for what the first is still deleting."""
    tier = _tier(3)
    assert tier.reserve(key(8)) == keys(0)
    assert tier.reserve(key(9)) == keys(1)
    tier.check()
    for number in (0, 1):
        tier.forget(key(number))
    assert tier.used_bytes == 30


def test_what_is_read_or_written_is_not_evicted() -> None:
    tier = _tier(2)
    tier.begin_read(key(0))
    tier.begin_read(key(1))
    tier.reserve(key(2))
    assert tier.reserve(key(3)) is None
    tier.check()
    assert not tier.end_read(key(1), GetOutcome.OK, 0.0)
    assert tier.reserve(key(3)) == keys(1)


def test_a_lost_chunk_is_not_found_again() -> None:
    tier = _tier(1)
    tier.begin_read(key(0))
    assert not tier.end_read(key(0), GetOutcome.MISSING, 0.0)
    assert not tier.is_known(key(0))
    tier.check()


def test_a_chunk_that_cannot_be_read_rests_longer_each_time() -> None:
    tier = _tier(1)
    now_s = 100.0
    for pause_s in (1.0, 2.0, 4.0):
        tier.begin_read(key(0))
        assert not tier.end_read(key(0), GetOutcome.FAILED, now_s)
        tier.check()
        assert key(0) in tier
        assert not tier.can_read(key(0), now_s + pause_s - 0.01)
        now_s += pause_s
        assert tier.can_read(key(0), now_s)
    tier.begin_read(key(0))
    assert not tier.end_read(key(0), GetOutcome.OK, now_s)
    tier.begin_read(key(0))
    tier.end_read(key(0), GetOutcome.FAILED, now_s)
    assert tier.can_read(key(0), now_s + 1.0)  # a read that succeeded has ended the row


def test_a_chunk_that_cannot_be_read_may_leave_as_any_other() -> None:
    tier = _tier(1, capacity=1)
    tier.begin_read(key(0))
    assert not tier.end_read(key(0), GetOutcome.FAILED, 0.0)
    assert tier.reserve(key(1)) == keys(0)
    tier.check()
    tier.forget(key(0))
    tier.check()
    assert tier.publish(key(1))
    assert tier.can_read(key(1), 0.0)


def test_adopt_keeps_the_most_recent() -> None:
    tier = LocalIndex(20, 10)
    assert tier.adopt(keys(1, 2, 3)) == keys(1)
    tier.forget(key(1))
    assert tier.keys() == keys(2, 3)
    tier.check()


def test_clear_hides_all_and_deletes_what_is_idle() -> None:
    tier = _tier(2)
    tier.begin_read(key(0))
    tier.reserve(key(2))
    assert tier.hide(keys(1, 0, 2)) == keys(1)
    assert tier.keys() == []
    assert tier.used_bytes == 30  # nothing is gone yet
    tier.check()
    tier.forget(key(1))
    assert tier.end_read(key(0), GetOutcome.OK, 0.0)
    tier.forget(key(0))
    assert not tier.publish(key(2))
    tier.forget(key(2))
    assert tier.used_bytes == 0


def test_a_limit_below_the_capacity_rotates() -> None:
    tier = _tier(2)
    tier.limit_to_used()
    assert tier.reserve(key(7)) == keys(0)
    tier.restore_limit()
    assert tier.reserve(key(8)) == []
    tier.check()


def test_no_capacity_holds_nothing() -> None:
    assert LocalIndex(0, 1).reserve(key(1)) is None


def test_pinned_chunks_are_passed_over_once_and_not_for_every_newcomer() -> None:
    tier = _tier(4, capacity=4)
    assert tier.operator_pin(key(0))
    assert tier.operator_pin(key(1))
    assert not tier.operator_pin(key(2))  # half is pinned
    assert tier.reserve(key(8)) == keys(2)
    assert tier.keys() == keys(0, 1, 3)
    assert tier.reserve(key(9)) == keys(3)
    assert tier.reserve(key(7)) is None
    assert tier.operator_unpin(key(0))
    assert not tier.operator_unpin(key(0))
    assert tier.reserve(key(7)) == keys(0)
    tier.check()


def test_clearing_all_hides_all_in_one_step_and_deletes_a_part_at_a_time() -> None:
    tier = _tier(4, capacity=6)
    tier.begin_read(key(0))
    tier.operator_pin(key(1))
    tier.reserve(key(4))
    tier.hide_all()
    assert tier.keys() == []
    assert all(map(tier.is_known, keys(0, 1, 2, 3, 4)))
    tier.check()
    assert tier.take_hidden(keys(0, 1)) == keys(1)
    tier.forget(key(1))
    assert tier.reserve(key(1)) == []
    assert tier.publish(key(1))
    assert tier.take_hidden(keys(0, 1, 2, 3, 2)) == keys(2, 3)
    assert tier.end_read(key(0), GetOutcome.OK, 0.0)
    assert not tier.publish(key(4))
    tier.check()
    for number in (0, 2, 3, 4):
        tier.forget(key(number))
    assert tier.keys() == keys(1)
    assert tier.used_bytes == 10
    tier.check()


def test_by_default_a_scan_leaves_chunks_that_are_used_again() -> None:
    tier = LocalIndex(40, 10)
    for number in (1, 2):
        tier.reserve(key(number))
        tier.publish(key(number))
        tier.touch(key(number))
    for number in range(100, 120):
        for victim in tier.reserve(key(number)) or ():
            tier.forget(victim)
        tier.publish(key(number))
        tier.check()
    assert {*keys(1, 2)} < {*tier.keys()}
