"""What may not be evicted now is passed over once, not by each eviction, and keeps its place."""

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheengine.residency.entry import Entry, State
from cacheengine.residency.eviction import POLICY_NAMES, make_policy
from cacheengine.residency.pool_index import CpuIndex
from cacheengine.residency.shards import Shards
from tests.cacheengine.building import key, keys


class CountedEntries(Shards[Entry]):
    """Entries that count how often one is looked at."""

    looks = 0

    def of(self, chunk: bytes) -> dict[bytes, Entry]:
        self.looks += 1
        return super().of(chunk)


def _index(policy: str, ready: int, slots: int) -> CpuIndex:
    index = CpuIndex(slots, policy)
    for number in range(ready):
        index.publish(index.add(key(number), State.STORING), now_s=0.0)
    return index


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_an_eviction_does_not_begin_with_all_that_is_pinned(name: str) -> None:
    index = _index(name, 300, 300)
    # The entries that an eviction would meet first.
    for chunk in list(index._policy.order())[:200]:
        entry = index.get(chunk)
        assert entry is not None
        index.pin(entry, 10.0, now_s=0.0)
    counted = CountedEntries()
    counted.parts = index._ready.parts
    index._ready = counted
    for _ in range(100):
        (victim,) = index.victims(1, (), now_s=1.0)
        index.remove(victim)
    assert index.victims(1, (), now_s=1.0) == []
    assert counted.looks == 300 + 100  # and once to remove it
    index.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_was_passed_over_leaves_in_its_old_turn(name: str) -> None:
    index = _index(name, 6, 6)
    entries = {entry.key: entry for entry in index}
    order = list(index._policy.order())
    for chunk in order[:4]:
        entries[chunk].in_use.holds += 1
    assert [each.key for each in index.victims(6, (), now_s=0.0)] == order[4:]
    assert list(index._policy.order()) == order
    for chunk in order[:4]:
        entries[chunk].in_use.holds -= 1
        index.tidy(entries[chunk])
    found = [each.key for each in index.victims(6, (), now_s=0.0)]
    assert found == (order if name != "MRU" else [*order[3::-1], *order[4:]])
    index.check()


def test_what_is_used_while_it_is_passed_over_is_the_most_recent() -> None:
    index = _index("LRU", 4, 4)
    first = index.get(key(0))
    assert first is not None
    first.in_use.holds += 1
    assert index.victims(1, (), now_s=0.0) != [first]
    index.touch([key(0)])
    first.in_use.holds -= 1
    index.tidy(first)
    assert [each.key for each in index.victims(4, (), now_s=0.0)] == keys(1, 2, 3, 0)


def test_pins_that_have_run_out_are_seen_by_an_eviction_that_comes_first() -> None:
    index = _index("LRU", 2, 2)
    for chunk in keys(0, 1):
        entry = index.get(chunk)
        assert entry is not None
        index.pin(entry, 5.0, now_s=0.0)
    assert index.victims(2, (), now_s=1.0) == []
    assert [each.key for each in index.victims(2, keys(1), now_s=6.0)] == keys(0)
    assert [each.key for each in index.victims(2, (), now_s=6.0)] == keys(0, 1)


def test_pins_end_in_the_order_of_their_deadlines_and_a_portion_at_a_time() -> None:
    index = _index("LRU", 4, 4)
    entries = {entry.key: entry for entry in index}
    for number, pin_s in ((2, 5.0), (0, 5.0), (1, 3.0), (3, 9.0)):
        index.pin(entries[key(number)], pin_s, now_s=0.0)
    assert [each.key for each in index.expired_pins(6.0)] == keys(1, 2, 0)
    assert [each.key for each in index.expired_pins(6.0, 2)] == keys(1, 2)
    index.pin(entries[key(1)], 8.0, now_s=0.0)
    assert [each.key for each in index.expired_pins(6.0)] == keys(2, 0)
    index.check()


_ACTS = st.sampled_from(["add", "touch", "remove", "evict", "pass", "resume"])


@given(
    name=st.sampled_from([name for name in POLICY_NAMES if name != "MRU"]),
    acts=st.lists(st.tuples(_ACTS, st.integers(0, 5)), max_size=60),
)
def test_passing_over_changes_no_order(name: str, acts: list[tuple[str, int]]) -> None:
    """A policy in which keys are passed over has the order of one that knows nothing of that."""
    told, plain = make_policy(name, 6), make_policy(name, 6)
    known: set[bytes] = set()
    passed: set[bytes] = set()

    def all_before(chunk: bytes) -> Iterator[bytes]:
        for each in list(told.candidates()):
            yield each
            if each == chunk:
                return

    for act, number in acts:
        chunk = key(number)
        if (act == "add") == (chunk in known):
            continue
        if act == "pass":
            for each in all_before(chunk) if chunk not in passed else ():
                told.pass_over(each)
                passed.add(each)
        elif act == "resume":
            told.resume(chunk)
            passed.discard(chunk)
        else:
            getattr(told, act)(chunk)
            getattr(plain, act)(chunk)
            (known.add if act in ("add", "touch") else known.discard)(chunk)
            if act != "touch" or name != "FIFO":
                passed.discard(chunk)
        assert list(told.order()) == list(plain.order())
        assert len(told) == len(plain) == len(known)
        offered = [each for each in plain.order() if each not in passed]
        assert list(islice(told.candidates(), len(known) + 1)) == offered
