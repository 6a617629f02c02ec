"""ARC: what it remembers of the evicted, what it learns from that, and that it loses nothing."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheengine.residency.eviction_policies import Arc, make_policy
from cacheengine.residency.pool_index import EntryState, PoolIndex
from tests.cacheengine.helpers import key, keys


def _arc(capacity: int) -> Arc:
    return Arc(capacity)


def _use(policy: Arc, capacity: int, *numbers: int) -> None:
    """Touch or, in place of the first in order, add."""
    for number in numbers:
        order = list(policy.order())
        if key(number) in order:
            policy.touch(key(number))
            continue
        if len(order) == capacity:
            policy.evict(order[0])
        policy.add(key(number))


def _learned(policy: Arc) -> float:
    return policy._target


def test_a_scan_passes_by_what_is_used_again() -> None:
    policy = _arc(4)
    _use(policy, 4, 1, 2, 1, 2, *range(100, 200))
    assert set(policy.order()) == set(keys(1, 2, 198, 199))


def test_return_of_a_key_used_once_makes_room_for_more_such_keys() -> None:
    policy = _arc(4)
    # 1 and 2 are used again; 5 takes the place of 3.
    _use(policy, 4, 1, 2, 1, 2, 3, 4, 5)
    assert list(policy.order()) == keys(4, 5, 1, 2)
    # 3 takes the place of 4, comes back as used again, and the target becomes 1.
    _use(policy, 4, 3)
    assert _learned(policy) == 1.0
    assert list(policy.order()) == keys(1, 2, 3, 5)


def test_return_of_a_key_used_again_takes_that_room_back() -> None:
    policy = _arc(4)
    _use(policy, 4, 1, 2, 1, 2, 3, 4, 5, 3)
    _use(policy, 4, 6)
    assert list(policy.order()) == keys(5, 2, 3, 6)  # 1 left: one of 5 and 6 may stay
    _use(policy, 4, 1)
    assert _learned(policy) == 0.0
    assert list(policy.order()) == keys(6, 2, 3, 1)


def test_the_step_is_the_ratio_of_the_ghosts() -> None:
    policy = _arc(8)
    for number in range(5):
        policy.add(key(number))
    for number in range(4):
        policy.touch(key(number))
    for number in range(5):
        policy.evict(key(number))
    policy.add(key(4))  # one ghost used once, four used again
    assert _learned(policy) == 4.0
    assert policy.ghosts == 4


def test_the_target_stays_within_the_capacity() -> None:
    policy = _arc(2)
    for _ in range(10):
        policy.add(key(1))
        policy.evict(key(1))
        policy.add(key(1))
        policy.remove(key(1))
    assert _learned(policy) == 2.0
    policy.add(key(1))
    policy.touch(key(1))
    for _ in range(10):
        policy.evict(key(1))
        policy.add(key(1))
    assert _learned(policy) == 0.0


def test_what_is_removed_leaves_no_ghost() -> None:
    policy = _arc(2)
    policy.add(key(1))
    policy.remove(key(1))
    assert policy.ghosts == 0
    policy.add(key(1))
    assert _learned(policy) == 0.0


def test_only_evictions_leave_ghosts_and_not_clearing() -> None:
    index = PoolIndex(2, "ARC")
    policy = index._policy
    assert isinstance(policy, Arc)
    evicted, cleared = (index.add(key(number), EntryState.STORING) for number in range(2))
    for entry in (evicted, cleared):
        index.publish(entry, now_s=0.0)
    index.remove(evicted)
    index.hide(cleared)
    index.remove(cleared)
    assert policy.ghosts == 1
    index.publish(index.add(key(0), EntryState.STORING), now_s=0.0)
    assert policy.ghosts == 0
    assert _learned(policy) == 1.0
    index.check()


@given(
    accesses=st.lists(st.integers(0, 12), max_size=200),
    capacity=st.integers(1, 6),
)
def test_a_full_cache_keeps_the_bounds_of_the_paper(accesses: list[int], capacity: int) -> None:
    policy = _arc(capacity)
    for number in accesses:
        _use(policy, capacity, number)
        assert key(number) in list(policy.order())
        assert len(policy._once) + len(policy._once_ghosts) <= capacity
        assert len(policy) + policy.ghosts <= 2 * capacity


CAPACITY = 4
CHUNKS = st.integers(0, 9).map(key)


class ArcMachine(RuleBasedStateMachine):
    """Any order of calls that the contract allows, against a set of keys."""

    @initialize()
    def start(self) -> None:
        policy = make_policy("ARC", CAPACITY)
        assert isinstance(policy, Arc)
        self.policy = policy
        self.known: set[bytes] = set()

    @precondition(lambda self: len(self.known) < CAPACITY)
    @rule(chunk=CHUNKS)
    def add(self, chunk: bytes) -> None:
        if chunk not in self.known:
            self.policy.add(chunk)
            self.known.add(chunk)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.policy.touch(self._some(data))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chunk = self._some(data)
        self.policy.remove(chunk)
        self.known.remove(chunk)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Any key: what is at the front may be held."""
        chunk = self._some(data)
        self.policy.evict(chunk)
        self.known.remove(chunk)

    def _some(self, data: st.DataObject) -> bytes:
        return data.draw(st.sampled_from(sorted(self.known)))

    @invariant()
    def order_has_every_key_once(self) -> None:
        order = list(self.policy.order())
        assert len(order) == len(self.policy) == len(self.known)
        assert set(order) == self.known

    @invariant()
    def ghosts_are_bounded_and_not_here(self) -> None:
        ghosts = [*self.policy._once_ghosts, *self.policy._again_ghosts]
        assert len(ghosts) == len(set(ghosts)) == self.policy.ghosts <= CAPACITY
        assert not set(ghosts) & self.known
        assert 0.0 <= _learned(self.policy) <= CAPACITY


TestArc = ArcMachine.TestCase
