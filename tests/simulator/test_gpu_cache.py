"""The GPU's cache: who is evicted, and when."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simulator.model.gpu_cache import GpuCache
from tests.simulator.helpers import keys


def filled(cache: GpuCache, name: str, count: int) -> list[bytes]:
    """Compute a prompt of this many blocks and release it; return what that evicted."""
    evicted = cache.allocate(count)
    for key in keys(name, count):
        assert cache.publish(key)
    cache.release(keys(name, count), 0)
    cache.check()
    return evicted


def test_what_was_left_the_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    cache = GpuCache(4)
    filled(cache, "a", 2)
    filled(cache, "b", 2)
    assert cache.allocate(1) == [keys("a", 2)[1]]
    assert cache.match(keys("a", 2), 2) == 1


def test_a_use_makes_a_prefix_young_again() -> None:
    cache = GpuCache(4)
    filled(cache, "a", 2)
    filled(cache, "b", 2)
    cache.hold(keys("a", 2))
    cache.release(keys("a", 2), 0)
    assert cache.allocate(2) == list(reversed(keys("b", 2)))


def test_what_is_held_stays() -> None:
    cache = GpuCache(3)
    filled(cache, "a", 2)
    cache.hold(keys("a", 1))
    assert cache.allocate(2) == [keys("a", 2)[1]]
    with pytest.raises(ValueError, match="1 blocks are wanted and 0 are free"):
        cache.allocate(1)
    cache.check()


def test_the_same_content_twice_is_known_once() -> None:
    cache = GpuCache(4)
    cache.allocate(2)
    (key,) = keys("a", 1)
    assert [cache.publish(key), cache.publish(key)] == [True, False]
    cache.release([key], 0)
    assert key in cache
    cache.release([], 1)
    cache.check()
    assert (cache.free_blocks, cache.cached_blocks) == (4, 1)


def test_two_holders_must_both_let_go() -> None:
    cache = GpuCache(1)
    filled(cache, "a", 1)
    cache.hold(keys("a", 1))
    cache.hold(keys("a", 1))
    cache.release(keys("a", 1), 0)
    assert cache.free_blocks == 0
    cache.release(keys("a", 1), 0)
    assert cache.free_blocks == 1


def test_it_is_emptied_only_when_idle() -> None:
    cache = GpuCache(2)
    filled(cache, "a", 1)
    cache.hold(keys("a", 1))
    assert not cache.clear()
    cache.release(keys("a", 1), 0)
    assert cache.clear()
    assert (cache.cached_blocks, cache.free_blocks) == (0, 2)


class AnyUse(RuleBasedStateMachine):
    """Requests come and go in any order; the numbers always add up."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = GpuCache(6)
        self.requests: list[tuple[list[bytes], int]] = []

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 4))
    def compute(self, name: str, count: int) -> None:
        wanted = keys(name, count)
        hits = self.cache.match(wanted, count)
        idle = self.cache.idle_among(wanted[:hits])
        if count - hits + idle > self.cache.free_blocks:
            return
        self.cache.hold(wanted[:hits])
        self.cache.allocate(count - hits)
        held, unkeyed = wanted[:hits], count - hits
        for key in wanted[hits:]:
            if self.cache.publish(key):
                held.append(key)
                unkeyed -= 1
        self.requests.append((held, unkeyed))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.cache.release(*self.requests.pop(which % len(self.requests)))

    @invariant()
    def adds_up(self) -> None:
        self.cache.check()
        held = {key for keys, _ in self.requests for key in keys}
        assert all(key in self.cache for key in held)
        assert self.cache.held_blocks == len(held) + sum(count for _, count in self.requests)


TestAnyUse = AnyUse.TestCase
