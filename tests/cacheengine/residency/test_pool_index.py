"""The pool's index, to exact outcomes."""

import pytest

from cacheengine.residency.pool_index import EntryState, PoolIndex
from tests.cacheengine.helpers import key, keys


def _index(ready: int, slots: int = 4) -> PoolIndex:
    index = PoolIndex(slots, "LRU")
    for number in range(ready):
        index.publish(index.add(key(number), EntryState.STORING), now_s=0.0)
    return index


def test_slots_are_given_and_come_back() -> None:
    index = _index(0)
    entries = [index.add(key(number), EntryState.STORING) for number in range(4)]
    assert [entry.slot for entry in entries] == [0, 1, 2, 3]
    assert index.free_slots == 0
    index.remove(entries[2])
    assert index.add(key(9), EntryState.PROMOTING).slot == 2
    index.check()


def test_only_published_entries_are_ready() -> None:
    index = _index(0)
    entry = index.add(key(1), EntryState.STORING)
    assert index.ready(key(1)) is None
    index.publish(entry, now_s=0.0)
    assert index.ready(key(1)) is entry
    index.check()


def test_victims_are_the_least_recent_that_nobody_needs() -> None:
    index = _index(4)
    index.touch(keys(0))
    held = index.ready(key(1))
    assert held is not None
    index.hold(held)
    assert [entry.key for entry in index.victims(4, protected=())] == keys(2, 3, 0)
    assert [entry.key for entry in index.victims(1, protected=keys(2))] == keys(3)
    assert index.victims(0, protected=()) == []


def test_a_pin_keeps_until_its_deadline() -> None:
    index = _index(1)
    entry = index.ready(key(0))
    assert entry is not None
    index.pin(entry, 5.0, now_s=0.0)
    index.pin(entry, 3.0, now_s=0.0)  # the longer one counts
    assert index.expired_pins(4.9) == []
    assert index.end_expired(entry, 4.9) == 0
    assert index.victims(1, protected=()) == []
    assert index.expired_pins(5.0) == [entry]
    assert index.end_expired(entry, 5.0) == 1
    assert index.expired_pins(5.0) == []
    assert index.victims(1, protected=()) == [entry]
    index.check()


def test_a_pin_asked_for_early_runs_from_when_the_bytes_are_there() -> None:
    index = _index(0)
    entry = index.add(key(1), EntryState.PROMOTING)
    index.pin(entry, 10.0, now_s=0.0)
    index.pin(entry, 3.0, now_s=0.0)  # the longer one counts
    index.publish(entry, now_s=100.0)
    assert entry.leases == {None: 110.0}
    assert entry.is_pinned(109.9)
    assert not entry.is_pinned(110.0)
    index.check()


def test_entries_that_were_cleared_are_not_found_and_keep_their_slot() -> None:
    index = _index(2)
    entry = index.ready(key(0))
    assert entry is not None
    index.hold(entry)
    index.hide(entry)
    assert index.ready(key(0)) is None
    assert index.ready_keys() == keys(1)
    assert index.free_slots == 2
    index.check()
    index.release(entry)
    with pytest.raises(AssertionError, match="still here"):
        index.check()
    index.remove(entry)
    index.check()
    assert index.free_slots == 3


def test_touch_ignores_the_unknown() -> None:
    index = _index(1)
    index.touch(keys(0, 7))
    index.check()


def test_check_finds_a_lost_slot() -> None:
    index = _index(2)
    del index._entries[key(0)]
    with pytest.raises(AssertionError, match="lost"):
        index.check()


def test_what_an_operator_pinned_is_no_victim() -> None:
    index = _index(4)
    entry = index.ready(key(0))
    assert entry is not None
    assert index.operator_pin(entry.key)
    assert [each.key for each in index.victims(4, protected=())] == keys(1, 2, 3)
    assert set(index.ready_keys()) == set(keys(0, 1, 2, 3))
    index.touch(keys(0))
    index.check()
    assert index.operator_unpin(entry.key)
    assert [each.key for each in index.victims(4, protected=())] == keys(1, 2, 3, 0)
    index.check()


def test_clearing_all_hides_all_in_one_step() -> None:
    index = _index(3)
    in_use, pinned, idle = (index.get(key(number)) for number in range(3))
    assert in_use is not None and pinned is not None and idle is not None
    unfinished = index.add(key(3), EntryState.STORING)
    index.hold(in_use)
    index.pin(pinned, 10.0, now_s=0.0)
    index.operator_pin(idle.key)
    index.hide_all()
    assert index.ready_keys() == []
    assert all(map(index.is_hidden, (in_use, pinned, idle, unfinished)))
    assert index.pins_left == 3
    assert index.expired_pins(100.0) == []
    assert not index.operator_unpin(idle.key)
    assert index.free_slots == 0
    index.check()
    for entry in (pinned, idle, unfinished):
        index.remove(entry)
    index.check()
    index.publish(index.add(key(1), EntryState.STORING), now_s=0.0)
    assert index.ready_keys() == keys(1)
    index.release(in_use)
    index.remove(in_use)
    index.check()
    assert index.free_slots == 3


def test_what_cannot_be_evicted_is_counted() -> None:
    index = _index(4, slots=5)
    held, pinned, by_operator, _ = index
    index.add(key(4), EntryState.STORING)
    index.hold(held)
    index.pin(pinned, 10.0, now_s=0.0)
    index.operator_pin(by_operator.key)
    assert index.count_kept(9.9) == 4
    assert index.count_kept(10.0) == 3
    index.hold(pinned)
    assert index.count_kept(10.0) == 4
