"""Intervals over seeds and within one."""

import math
import random
import statistics

import pytest

from bench.proof.figures import (
    _T_975,
    Clustered,
    difference,
    geometric,
    over_seeds,
    ratio,
    within_seed,
)


def students_t_975(degrees: int) -> float:
    """Return the quantile by integrating the density, with Simpson's rule and bisection."""

    def half_mass(limit: float, steps: int = 500) -> float:
        def density(x: float) -> float:
            return float((1 + x * x / degrees) ** (-(degrees + 1) / 2))

        width = limit / steps
        inner = sum((4 if at % 2 else 2) * density(at * width) for at in range(1, steps))
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
        scale /= math.sqrt(degrees * math.pi)
        return scale * width / 3 * (density(0) + inner + density(limit))

    low, high = 1.0, 20.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if half_mass(middle) < 0.475 else (low, middle)
    return low


@pytest.mark.parametrize("degrees", range(1, 31))
def test_the_table_of_students_t_is_right(degrees: int) -> None:
    assert _T_975[degrees - 1] == pytest.approx(students_t_975(degrees), abs=6e-4)


def test_an_interval_over_five_seeds() -> None:
    found = over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5 / 5)
    assert (found.value, found.seeds) == (3.0, 5)
    assert [found.low, found.high] == pytest.approx([3 - half, 3 + half])


def test_one_seed_says_nothing_of_the_interval() -> None:
    found = over_seeds([2.0])
    assert (found.value, found.low, found.high) == (2.0, -math.inf, math.inf)
    one = ratio([1.0], [2.0])
    assert one is not None
    assert (one.value, one.low, one.high) == (0.5, 0.0, math.inf)


def test_intervals_hold_the_truth_in_95_of_100() -> None:
    chooser = random.Random(1)
    held = 0
    for _ in range(2_000):
        ours = [chooser.lognormvariate(math.log(2), 0.3) for _ in range(5)]
        theirs = [chooser.lognormvariate(math.log(4), 0.3) for _ in range(5)]
        found = ratio(ours, theirs)
        assert found is not None
        held += found.low <= 0.5 <= found.high
    assert held / 2_000 == pytest.approx(0.95, abs=0.015)


def test_what_seeds_have_in_common_cancels() -> None:
    hard = [1.0, 3.0, 9.0]
    found = ratio([each * 0.5 for each in hard], hard)
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([0.5, 0.5, 0.5])
    apart = difference([each - 0.25 for each in hard], hard)
    assert [apart.value, apart.low] == pytest.approx([-0.25, -0.25])


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    ours, theirs = [1.0, 1.3, 0.9], [2.0, 2.1, 2.4]
    one, other = ratio(ours, theirs), ratio(theirs, ours)
    assert one is not None
    assert other is not None
    assert one.low == pytest.approx(1 / other.high)


def test_infinite_times() -> None:
    assert ratio([None], [None]) is None
    worse = ratio([1.0, None], [1.0, 2.0])
    assert worse is not None
    assert worse.low == math.inf
    better = ratio([1.0, 2.0], [None, None])
    assert better is not None
    assert better.high == 0.0
    # A seed that only the peer fails would raise the gain without bound: it is left out.
    partly = ratio([1.0, 1.0, 1.0], [None, 2.0, 2.0])
    assert partly is not None
    assert [partly.value, partly.seeds] == pytest.approx([0.5, 2])
    assert geometric([1.0, None]) is None
    middle = geometric([1.0, 4.0])
    assert middle is not None
    assert middle.value == pytest.approx(2.0)


def clustered(chooser: random.Random, factor: float, *, sessions: int = 200) -> Clustered:
    values, clusters = [], []
    for session in range(sessions):
        level = random.Random(session).lognormvariate(0, 0.5)
        for _ in range(5):
            values.append(factor * level * chooser.lognormvariate(0, 0.2))
            clusters.append(session)
    return Clustered(values=values, clusters=clusters)


def test_within_a_seed_whole_sessions_are_drawn() -> None:
    ours, theirs = clustered(random.Random(1), 1.0), clustered(random.Random(2), 2.0)
    found = within_seed(ours, theirs, share=0.9, seed=1)
    assert found is not None
    nearest = [sorted(run.values)[round(0.9 * len(run.values)) - 1] for run in (ours, theirs)]
    assert found.value == pytest.approx(nearest[0] / nearest[1])
    assert found.low < found.value < found.high
    assert found == within_seed(ours, theirs, share=0.9, seed=1)


def test_drawing_sessions_gives_wider_intervals_than_drawing_requests() -> None:
    """Requests of a session are alike, so that there is less in them than their number says."""
    ours = clustered(random.Random(1), 1.0)
    flat = Clustered(values=[1.0] * len(ours.values), clusters=ours.clusters)
    alone = list(range(len(ours.values)))
    by_session = within_seed(ours, flat, share=0.9, seed=1)
    by_request = within_seed(
        Clustered(values=ours.values, clusters=alone),
        Clustered(values=flat.values, clusters=alone),
        share=0.9,
        seed=1,
    )
    assert by_session is not None
    assert by_request is not None
    assert by_session.high - by_session.low > 1.5 * (by_request.high - by_request.low)


def test_within_a_seed_of_infinite_quantiles_nothing_is_said() -> None:
    mostly = Clustered(values=[1.0, math.inf, math.inf], clusters=[1, 2, 3])
    assert within_seed(mostly, mostly, share=0.9, seed=1) is None
    assert statistics.fmean(mostly.values) == math.inf
