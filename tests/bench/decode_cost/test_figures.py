"""What the samples of running decodes are made into."""

import math
from collections.abc import Sequence

import pytest

from bench.decode_cost.figures import (
    FIGURES,
    Delay,
    Step,
    Window,
    difference,
    quantile,
    ratio,
    suffers,
    summary,
    together,
)
from bench.decode_cost.situations import Pace, Situation, Where, Work
from bench.replica.intervals import Interval
from bench.stress.inside.lock import Durations

PLAIN, IDLE = Situation(has_engine=False), Situation()
DISK, SEND = (
    Situation(work=work, where=Where.INSIDE, pace=Pace.FULL) for work in (Work.DISK, Work.SEND)
)


def _twin(situation: Situation) -> Situation:
    assert situation.twin is not None
    return situation.twin


def _window(
    situation: Situation, number: int, gaps_s: Sequence[float], *, delay: Delay | None = None
) -> Window:
    return Window(
        situation=situation,
        round=number,
        seconds=2.0,
        gaps_s=gaps_s,
        steps=[Step(seconds=2 * each, computed_s=each, without_core_s=each / 2) for each in gaps_s],
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
        for situation, factor in ((PLAIN, 1.0), (DISK, 1.2))
    ]
    found = ratio(windows, DISK, PLAIN, FIGURES["gap_p99_ms"])
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
        _window(situation, 0, [gap_s] * 10, delay=late if situation == SEND else None)
        for situation, gap_s in (
            *((PLAIN, 0.01), (IDLE, 0.01), (DISK, 0.02), (_twin(DISK), 0.02)),
            *((SEND, 0.03), (_twin(SEND), 0.02)),
        )
    ]
    found = summary(windows, SEND)
    assert (found["gap_p99_ms"], found["step_p99_ms"]) == (30.0, 60.0)
    assert found["moved_gb_per_s"] == 0.5
    assert found["of_it_without_core"]["max_ms"] == 2.0
    assert found["of_it_without_gil"]["max_ms"] == 3.0
    assert found["share_of_time_without_gil"] == 0.0015
    assert found["gap_p99_over_plain"]["ratio"] == 3.0
    assert found["gap_p99_over_plain"]["beyond_5_percent"] == "yes"
    assert found["gap_p99_over_outside"]["ratio"] == 1.5
    assert found["moved_over_outside"]["ratio"] == 1.0
    assert found["with_core_p99_ms"] == 45.0
    assert found["step_is_made_of"] == {
        "computed_ms": 30.0,
        "without_core_ms": 15.0,
        "asleep_ms": 15.0,
        "asleep_p99_ms": 15.0,
    }
    idle = summary(windows, IDLE)
    assert idle["gap_p99_over_plain"]["beyond_5_percent"] == "no"
    assert "gap_p99_over_outside" not in idle


def test_all_work_together_is_compared_with_its_twins_round_by_round() -> None:
    windows = [
        _window(situation, number, [factor * (1 + number)] * 10)
        for number in range(2)
        for inside, factors in ((DISK, (2.0, 1.0)), (SEND, (0.5, 1.0)))
        for situation, factor in zip((inside, _twin(inside)), factors, strict=True)
    ]
    figure = FIGURES["gap_p99_ms"]
    found = together(windows, Pace.FULL, is_parted=False, figure=figure)
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert [found.low, found.high] == pytest.approx([0.5, 2.0])
    assert together(windows, Pace.MODERATE, is_parted=False, figure=figure) is None
