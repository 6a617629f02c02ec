"""Goodput before, during and after a peak: the workload's shape, the figures, the bars."""

from dataclasses import replace

import pytest

from bench.discrete.overload import Phase, Plan, phase, play_peak, verdict, with_peak
from bench.ttft import BenchError
from bench.workloads.session import Session
from replay.record import Record

PLAN = Plan(workload="unique", phase_s=10.0, bound_s=5.0, permitted_wait_s=2.5)
PHASE = Phase(
    name="peak",
    due_per_s=1.0,
    goodput_per_s=1.0,
    in_time_share=1.0,
    refused_share=0.0,
    failed_share=0.0,
    ttft_p50_s=1.0,
    ttft_p90_s=1.0,
    refused_after_p90_s=None,
)


def test_starts_are_denser_in_the_peak_only() -> None:
    given = [Session(float(at), ()) for at in range(0, 60, 5)]
    moved = [each.start_s for each in with_peak(given, 10.0, 3.0, 10.0)]
    assert moved[:3] == [0.0, 5.0, 10.0]
    assert moved[3:8] == pytest.approx([10.0 + 5.0 / 3 * at for at in range(1, 6)])
    assert moved[8:] == pytest.approx([20.0, 25.0, 30.0, 35.0])


def test_a_phase_counts_what_was_due_in_it() -> None:
    def record(due_s: float, ttft_s: float | None, status: int = 200) -> Record:
        error = None if status == 200 else "refused"
        return Record(
            number=0,
            session=None,
            turn=0,
            prompt_tokens=1,
            due_s=due_s,
            ttft_s=ttft_s,
            status=status,
            error=error,
            total_s=0.5,
        )

    records = [
        record(9.9, 1.0),
        record(10.0, 1.0),
        record(11.0, 5.1),
        record(12.0, None, 429),
        record(13.0, None, 503),
        record(20.0, 1.0),
    ]
    found = phase("peak", records, 10.0, PLAN)
    assert (found.due_per_s, found.goodput_per_s, found.in_time_share) == (0.4, 0.1, 0.25)
    assert (found.refused_share, found.failed_share) == (0.25, 0.25)
    assert (found.ttft_p90_s, found.refused_after_p90_s) == (5.1, 0.5)
    with pytest.raises(BenchError, match="no request was due in the phase 'late'"):
        phase("late", records, 100.0, PLAN)


@pytest.mark.parametrize(
    ("goodput_per_s", "after_share", "is_met"),
    [(0.9, 1.0, [True, True]), (0.8, 1.0, [False, True]), (1.2, 0.9, [True, False])],
)
def test_bars(goodput_per_s: float, after_share: float, is_met: list[bool]) -> None:
    highest = replace(PHASE, goodput_per_s=goodput_per_s)
    after = replace(PHASE, in_time_share=after_share)
    found = verdict({1.0: [PHASE] * 3, 3.0: [PHASE, highest, after]}, PHASE)
    assert [each for each, _ in found] == is_met


def test_an_overload_is_refused_at_once_and_the_others_are_in_time() -> None:
    """Nothing is cached here, so a request takes what its prompt takes."""
    plan = replace(PLAN, phase_s=60.0, replicas=2)
    before, peak, after = play_peak(plan, 3.0)
    assert peak.due_per_s > 3 * before.due_per_s
    assert peak.refused_share > 0.5 and peak.refused_after_p90_s == 0.0
    assert peak.goodput_per_s > before.goodput_per_s
    assert after.failed_share == peak.failed_share == 0.0
