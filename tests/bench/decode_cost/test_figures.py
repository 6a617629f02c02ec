"""What the samples of running decodes are made into."""

import math
from collections.abc import Sequence

import pytest

from bench.decode_cost.figures import (
    FIGURES,
    Delay,
    Window,
    difference,
    quantile,
    ratio,
    suffers,
    summary,
)
from bench.decode_cost.pressure import Situation
from bench.replica.intervals import Interval
from bench.stress.inside.lock import Durations


def _window(
    situation: Situation, number: int, gaps_s: Sequence[float], *, delay: Delay | None = None
) -> Window:
    return Window(
        situation=situation,
        round=number,
        seconds=2.0,
        gaps_s=gaps_s,
        steps_s=[2 * each for each in gaps_s],
        delays=[delay or Delay(late_s=0.0, without_core_s=0.0)],
        moved_bytes=10**9,
        failures=0,
        lock={},
    )


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
    assert math.isnan(quantile([], 0.5))


def test_a_ratio_pairs_windows_of_the_same_round() -> None:
    windows = [
        _window(situation, number, [factor * slower] * 100)
        # The machine is three times slower in the second round: for both.
        for number, slower in enumerate((0.01, 0.03))
        for situation, factor in ((Situation.PLAIN, 1.0), (Situation.DISK, 1.2))
    ]
    found = ratio(windows, Situation.DISK, Situation.PLAIN, FIGURES["gap_p99_ms"])
    assert found.value == pytest.approx(1.2)
    assert [found.low, found.high] == pytest.approx([1.2, 1.2])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.06, 1.3, "yes"), (0.9, 1.05, "no"), (0.9, 1.2, "not to be told")],
)
def test_five_percent_are_passed_by_the_whole_interval_or_it_is_not_to_be_told(
    low: float, high: float, said: str
) -> None:
    assert suffers(Interval(value=(low + high) / 2, low=low, high=high)) == said


def test_a_late_thread_waited_for_a_core_or_else_for_the_gil() -> None:
    assert Delay(late_s=0.006, without_core_s=0.0).gil_s == pytest.approx(0.0059)
    assert Delay(late_s=0.006, without_core_s=0.0059).gil_s == pytest.approx(0.0, abs=1e-9)
    assert Delay(late_s=0.00006, without_core_s=0.0).gil_s == 0.0


def test_readings_of_a_lock_are_told_apart_by_window() -> None:
    before, after = Durations(), Durations()
    before.add(9_000_000)
    for duration_ns in (9_000_000, 2_000, 3_000):
        after.add(duration_ns)
    found = difference(after, before)
    assert found.counts.total() == 2
    assert found.longest_ns < 4_000


def test_a_summary_has_every_figure_of_its_situation_alone() -> None:
    late = Delay(late_s=0.0051, without_core_s=0.002)
    windows = [
        _window(situation, 0, [gap_s] * 10, delay=late if situation is Situation.SEND else None)
        for situation, gap_s in zip(Situation, (0.01, 0.01, 0.02, 0.02, 0.03, 0.02), strict=True)
    ]
    found = summary(windows, Situation.SEND)
    assert (found["gap_p99_ms"], found["step_p99_ms"]) == (30.0, 60.0)
    assert found["moved_gb_per_s"] == 0.5
    assert found["of_it_without_core"]["max_ms"] == 2.0
    assert found["of_it_without_gil"]["max_ms"] == 3.0
    assert found["share_of_time_without_gil"] == 0.0015
    assert found["gap_p99_over_plain"]["ratio"] == 3.0
    assert found["gap_p99_over_plain"]["beyond_5_percent"] == "yes"
    assert summary(windows, Situation.IDLE)["gap_p99_over_plain"]["beyond_5_percent"] == "no"
