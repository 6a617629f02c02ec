"""Every kind of work inside vLLM's process has a twin outside, and stands next to it."""

import random

from bench.decode_cost.situations import GROUPS, SITUATIONS, Situation, Where, shuffled


def test_each_work_inside_has_its_twin_which_differs_in_nothing_else() -> None:
    inside = [each for each in SITUATIONS if each.where is Where.INSIDE]
    assert inside
    for each in inside:
        assert each.twin in SITUATIONS
        assert each.twin == Situation(
            work=each.work, where=Where.OUTSIDE, pace=each.pace, is_parted=each.is_parted
        )
        assert each.twin.twin is None
    assert {each.twin for each in inside} == {
        each for each in SITUATIONS if each.where is Where.OUTSIDE
    }


def test_what_all_is_compared_with_is_measured_on_the_same_cores() -> None:
    for each in SITUATIONS:
        assert {each.plain, each.idle} <= set(SITUATIONS)
        assert each.plain.is_parted == each.idle.is_parted == each.is_parted


def test_a_round_has_every_situation_once_and_twins_next_to_each_other() -> None:
    order = random.Random(3)
    rounds = [shuffled(order) for _ in range(5)]
    for each in rounds:
        assert len(each) == len(SITUATIONS)
        assert set(each) == set(SITUATIONS)
        for group in GROUPS:
            assert abs(each.index(group[0]) - each.index(group[1])) == 1
    assert len({tuple(each) for each in rounds}) == len(rounds)


def test_all_have_names_of_their_own() -> None:
    assert len({str(each) for each in SITUATIONS}) == len(SITUATIONS)
