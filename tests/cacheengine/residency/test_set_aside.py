"""Entries in use leave the eviction policy, so that no eviction meets them twice."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheengine.residency.eviction_policies import POLICY_NAMES, EvictionPolicy, make_policy
from cacheengine.residency.pool_index import EntryState, PoolEntry, PoolIndex
from tests.cacheengine.helpers import key, keys


class CountedEntries(dict[bytes, PoolEntry]):
    """Entries that count how often one is looked at."""

    looks = 0

    def __getitem__(self, chunk: bytes) -> PoolEntry:
        self.looks += 1
        return super().__getitem__(chunk)


def _index(policy: str, ready: int, slots: int) -> PoolIndex:
    index = PoolIndex(slots, policy)
    for number in range(ready):
        index.publish(index.add(key(number), EntryState.STORING), now_s=0.0)
    return index


def _victims(index: PoolIndex, count: int) -> list[bytes]:
    return [entry.key for entry in index.victims(count, ())]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_an_eviction_does_not_begin_with_all_that_is_in_use(name: str, is_held: bool) -> None:
    index = _index(name, 300, 300)
    # The entries that an eviction would meet first.
    for chunk in list(index._policy.order())[:200]:
        entry = index.get(chunk)
        assert entry is not None
        if is_held:
            index.hold(entry)
        else:
            index.pin(entry, 10.0, now_s=0.0)
    counted = index._entries = CountedEntries(index._entries)
    for _ in range(100):
        (victim,) = index.victims(1, ())
        index.remove(victim)
    assert index.victims(1, ()) == []
    assert counted.looks == 100 + 200 * is_held
    index.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_an_eviction_met_in_use_leaves_in_its_old_turn(name: str) -> None:
    index = _index(name, 6, 6)
    entries = {entry.key: entry for entry in index}
    order = list(index._policy.order())
    for chunk in order[:4]:
        index.begin_put(entries[chunk])
    assert _victims(index, 6) == order[4:]
    # Puts end in prefix order, the chunk to be evicted last first.
    for chunk in reversed(order[:4]):
        index.end_put(entries[chunk])
    assert _victims(index, 6) == order
    index.check()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_is_used_while_it_is_set_aside_is_the_most_recent(name: str) -> None:
    index = _index(name, 4, 4)
    first = index.get(key(0))
    assert first is not None
    index.hold(first)
    assert _victims(index, 1) == keys(1)
    index.touch(keys(0))
    index.release(first)
    assert _victims(index, 4) == keys(1, 2, 3, 0)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_was_pinned_is_the_most_recent_at_the_end_of_its_last_pin(name: str) -> None:
    index = _index(name, 4, 4)
    entry = index.get(key(0))
    assert entry is not None
    for holder in ("one", "two"):
        index.pin(entry, 5.0, now_s=0.0, holder=holder)
    index.hold(entry)
    for holder in ("one", "two"):
        assert _victims(index, 4) == keys(1, 2, 3)
        index.end_pin(entry, holder)
    assert _victims(index, 4) == keys(1, 2, 3)
    index.release(entry)
    assert _victims(index, 4) == keys(1, 2, 3, 0)
    index.check()


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


_ACTS = st.sampled_from(["add", "touch", "remove", "evict", "set aside", "put back"])


@given(
    name=st.sampled_from(POLICY_NAMES),
    acts=st.lists(st.tuples(_ACTS, st.integers(0, 5)), max_size=60),
)
def test_keys_set_aside_from_the_front_change_no_order(
    name: str, acts: list[tuple[str, int]]
) -> None:
    """As an eviction does it: all before a key are set aside, and come back in reverse."""
    policy, plain = make_policy(name, 6), make_policy(name, 6)
    known: set[bytes] = set()
    aside: list[bytes] = []

    def put_back(chunk: bytes | None = None) -> None:
        while aside and (chunk is None or chunk in aside):
            policy.put_back(aside.pop())

    for act, number in acts:
        chunk = key(number)
        if (act == "add") == (chunk in known):
            continue
        if act == "set aside":
            put_back()
            for each in _before(policy, chunk):
                policy.set_aside(each)
                aside.append(each)
            assert list(policy.candidates()) == list(plain.order())[len(aside) :] or name == "ARC"
        elif act == "put back":
            put_back(chunk)
        else:
            put_back()
            for which in (policy, plain):
                getattr(which, act)(chunk)
            (known.add if act in ("add", "touch") else known.discard)(chunk)
        assert set(policy.order()) == known
        assert len(policy) == len(known)
        assert {*policy.candidates()} == known - {*aside}
        if not aside:
            assert list(policy.candidates()) == list(plain.order())


def _before(policy: EvictionPolicy, chunk: bytes) -> list[bytes]:
    found: list[bytes] = []
    candidates: Iterator[bytes] = policy.candidates()
    for each in candidates:
        found.append(each)
        if each == chunk:
            break
    return found
