"""The highest load at which 90% of the requests meet a bound."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.proof.figures import Goodput, Point, UnreachableError, find_goodput, goodput, monotone


def curve(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(load=load, share=share) for load, share in pairs]


def falls_at(true: float) -> list[Point]:
    """Search a share that falls straight from 1 at half of a load to 0.8 at one and a half."""
    return find_goodput(lambda load: 1.1 - 0.2 * load / true, 0.2, 1.4, 0.04)


def test_the_number_lies_straight_between_measured_loads() -> None:
    assert goodput(curve((0.5, 1.0), (0.8, 0.95), (1.0, 0.75))).load == pytest.approx(0.85)
    assert goodput(curve((1.0, 0.75), (0.5, 1.0), (0.8, 0.95))).load == pytest.approx(0.85)


def test_a_curve_that_never_crosses_is_told_as_lying_beyond() -> None:
    assert goodput(curve((0.5, 0.99), (0.8, 0.9))) == Goodput(load=0.8, beyond="above")
    assert goodput(curve((0.5, 0.7), (0.8, 0.6))) == Goodput(load=0.5, beyond="below")
    with pytest.raises(ValueError, match="no points"):
        goodput([])


def test_a_rise_is_noise_and_is_evened_out() -> None:
    noisy = curve((0.5, 1.0), (0.8, 0.88), (0.9, 0.96), (1.1, 0.6))
    assert [each.share for each in monotone(noisy)] == pytest.approx([1.0, 0.92, 0.92, 0.6])
    assert goodput(noisy).load == pytest.approx(0.9 + 0.2 * 0.02 / 0.32)


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.0, 1.0)), min_size=1, max_size=12))
def test_a_monotone_curve_never_rises_and_keeps_the_mean(pairs: list[tuple[float, float]]) -> None:
    made = monotone(curve(*pairs))
    shares = [each.share for each in made]
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(shares))
    assert sum(shares) == pytest.approx(sum(share for _, share in pairs))
    assert [each.load for each in made] == sorted(load for load, _ in pairs)


@pytest.mark.parametrize("true", [0.25, 0.6, 0.83, 1.02, 1.3])
def test_bisection_finds_the_load(true: float) -> None:
    points = falls_at(true)
    assert goodput(points).load == pytest.approx(true, abs=1e-9)
    assert len(points) == 5


def test_a_load_outside_of_the_search_lies_beyond() -> None:
    assert goodput(falls_at(2.0)).beyond == "above"
    assert goodput(falls_at(0.1)).beyond == "below"


def test_a_load_that_cannot_be_offered_is_a_limit() -> None:
    def measure(load: float) -> float:
        if load > 1.0:
            raise UnreachableError(f"{load} is too much")
        return 0.99

    found = goodput(find_goodput(measure, 0.2, 1.4, 0.04))
    assert found.beyond == "above"
    assert 0.95 < found.load <= 1.0


def test_where_no_load_can_be_offered_the_reason_is_told() -> None:
    def measure(load: float) -> float:
        raise UnreachableError("the KV memory binds")

    with pytest.raises(UnreachableError, match="the KV memory binds"):
        find_goodput(measure, 0.2, 1.4, 0.04)
