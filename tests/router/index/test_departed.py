"""Keys that replicas lost, and where they were last."""

from hypothesis import given
from hypothesis import strategies as st

from router.index.departed import DepartedKeys, Departure
from router.index.prompt_keys import KvTier


def test_the_last_place_of_a_key_is_remembered() -> None:
    departed = DepartedKeys(100)
    departed.pass_time(5.0)
    departed.left(0, KvTier.GPU, [1, 2])
    departed.pass_time(7.0)
    departed.left(1, KvTier.DISK, [2])
    departed.pass_time(9.0)
    departed.lost(2, KvTier.CPU, {1: None})
    assert departed.get(1) == Departure(2, KvTier.CPU, 9.0, is_whole=True)
    assert departed.get(2) == Departure(1, KvTier.DISK, 7.0)
    assert departed.get(3) is None
    departed.pass_time(11.0)
    departed.left(0, KvTier.GPU, [1])
    assert departed.get(1) == Departure(0, KvTier.GPU, 11.0)


def test_what_left_first_is_forgotten_first() -> None:
    departed = DepartedKeys(40)
    for key in range(35):
        departed.left(0, KvTier.GPU, [key])
    assert departed.get(0) is None and departed.get(34) is not None
    for slot in range(9):
        departed.lost(slot, KvTier.CPU, dict.fromkeys(range(slot * 100, slot * 100 + 9)))
    assert departed.get(0) is None and departed.get(801) is not None
    departed.check()


@given(
    most=st.integers(0, 50),
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=30)), max_size=30
    ),
)
def test_its_bound_holds(most: int, steps: list[tuple[bool, list[int]]]) -> None:
    departed = DepartedKeys(most)
    for is_whole, keys in steps:
        if is_whole:
            departed.lost(0, KvTier.GPU, dict.fromkeys(keys))
        else:
            departed.left(0, KvTier.GPU, keys)
        departed.check()
