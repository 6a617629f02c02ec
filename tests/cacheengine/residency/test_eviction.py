"""The orders in which chunks leave."""

import pytest

from cacheengine.residency.eviction_policies import POLICY_NAMES, make_policy
from tests.cacheengine.helpers import key, keys


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("LRU", [2, 4, 1, 3]),
        ("lru", [2, 4, 1, 3]),
        ("ARC", [2, 4, 1, 3]),
    ],
)
def test_order(name: str, order: list[int]) -> None:
    policy = make_policy(name, 100)
    for chunk in keys(1, 2, 3, 4):
        policy.add(chunk)
    for chunk in keys(3, 1, 3):
        policy.touch(chunk)
    assert list(policy.order()) == keys(*order)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_forgets_what_is_removed(name: str) -> None:
    policy = make_policy(name, 100)
    for chunk in keys(1, 2):
        policy.add(chunk)
        policy.touch(chunk)
    policy.remove(key(1))
    assert list(policy.order()) == keys(2)
    policy.add(key(1))
    assert set(policy.order()) == set(keys(1, 2))
    assert len(policy) == 2


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_was_evicted_can_come_back(name: str) -> None:
    policy = make_policy(name, 2)
    for chunk in keys(1, 2):
        policy.add(chunk)
    policy.evict(key(1))
    assert list(policy.order()) == keys(2)
    policy.add(key(1))
    assert set(policy.order()) == set(keys(1, 2))
    assert len(policy) == 2
