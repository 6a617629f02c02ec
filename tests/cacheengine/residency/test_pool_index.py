"""The pool's index, to exact outcomes."""

import pytest

from cacheengine.residency.entry import Entry, State, Use, count_held
from cacheengine.residency.pool_index import CpuIndex
from tests.cacheengine.building import key, keys


def _index(ready: int, slots: int = 4) -> CpuIndex:
    index = CpuIndex(slots, "LRU")
    for number in range(ready):
        index.publish(index.add(key(number), State.STORING), now_s=0.0)
    return index


def test_slots_are_given_and_come_back() -> None:
    index = _index(0)
    entries = [index.add(key(number), State.STORING) for number in range(4)]
    assert [entry.slot for entry in entries] == [0, 1, 2, 3]
    assert index.free_slots == 0
    index.remove(entries[2])
    assert index.add(key(9), State.PROMOTING).slot == 2
    index.check()


def test_only_published_entries_are_ready() -> None:
    index = _index(0)
    entry = index.add(key(1), State.STORING)
    assert index.ready(key(1)) is None
    index.publish(entry, now_s=0.0)
    assert index.ready(key(1)) is entry
    index.check()


def test_victims_are_the_least_recent_that_nobody_needs() -> None:
    index = _index(4)
    index.touch(keys(0))
    held = index.ready(key(1))
    assert held is not None
    held.in_use.holds = 1
    assert [entry.key for entry in index.victims(4, protected=(), now_s=0.0)] == keys(2, 3, 0)
    assert [entry.key for entry in index.victims(1, protected=keys(2), now_s=0.0)] == keys(3)
    assert index.victims(0, protected=(), now_s=0.0) == []


def test_a_pin_keeps_until_its_deadline() -> None:
    index = _index(1)
    entry = index.ready(key(0))
    assert entry is not None
    index.pin(entry, 5.0, now_s=0.0)
    index.pin(entry, 3.0, now_s=0.0)  # the longer one counts
    assert index.victims(1, protected=(), now_s=4.9) == []
    assert index.expired_pins(4.9) == []
    assert index.victims(1, protected=(), now_s=5.0) == [entry]
    assert index.expired_pins(5.0) == [entry]
    assert index.end_expired(entry, 5.0) == 1
    assert index.expired_pins(5.0) == []
    index.check()


def test_a_pin_asked_for_early_runs_from_when_the_bytes_are_there() -> None:
    index = _index(0)
    entry = index.add(key(1), State.PROMOTING)
    index.pin(entry, 10.0, now_s=0.0)
    index.pin(entry, 3.0, now_s=0.0)  # the longer one counts
    index.publish(entry, now_s=100.0)
    assert entry.seen.pinned_until_s == 110.0
    index.check()


def test_condemned_entries_are_not_found_and_keep_their_slot() -> None:
    index = _index(2)
    entry = index.ready(key(0))
    assert entry is not None
    entry.in_use.holds = 1
    index.condemn(entry)
    assert index.ready(key(0)) is None
    assert index.ready_keys() == keys(1)
    assert index.free_slots == 2
    index.check()
    entry.in_use.holds = 0
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
    del index._ready.of(key(0))[key(0)]
    with pytest.raises(AssertionError, match="lost"):
        index.check()


def test_what_an_operator_pinned_is_no_victim() -> None:
    index = _index(4)
    entry = index.ready(key(0))
    assert entry is not None
    assert index.operator_pin(entry.key)
    assert [each.key for each in index.victims(4, protected=(), now_s=0.0)] == keys(1, 2, 3)
    assert set(index.ready_keys()) == set(keys(0, 1, 2, 3))
    index.touch(keys(0))
    index.check()
    assert index.operator_unpin(entry.key)
    assert entry.use is None  # nothing goes on with it: no memory for that
    assert [each.key for each in index.victims(4, protected=(), now_s=0.0)] == keys(1, 2, 3, 0)
    index.check()


def test_a_chunk_that_nothing_goes_on_with_is_small() -> None:
    index = _index(1)
    entry = index.ready(key(0))
    assert entry is not None
    assert entry.use is None
    index.pin(entry, 5.0, now_s=0.0)
    assert entry.use is not None
    index.unpin(entry)
    assert entry.use is None


class EndingUse(Entry):
    """An entry whose use another thread ends just after it has been read for the first time."""

    __slots__ = ("_reads",)

    @property
    def use(self) -> Use | None:
        self._reads += 1
        return Use() if self._reads == 1 else None

    @use.setter
    def use(self, use: Use | None) -> None:
        self._reads = 0


def test_entries_are_counted_while_their_use_ends() -> None:
    """Statistics count without the engine's lock."""
    entry = EndingUse(key(1), 0, State.READY)
    assert entry.is_usable
    entry.use = None
    assert entry.is_idle(0.0)
    entry.use = None
    assert count_held([entry], 0.0) == 0
