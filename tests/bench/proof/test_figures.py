"""The figures of one run, from records made by hand."""

import math
from typing import Any

import pytest

from bench.proof.figures import Figures, Window, figures
from bench.ttft import BenchError
from replay.record import Record
from tests.bench.proof.scripted import failed, record


def told(records: list[Record], reported: list[int] | None = None, **more: Any) -> Figures:
    known: dict[str, Any] = {
        "reported": [each.number for each in records] if reported is None else reported,
        "window": Window(from_s=10.0, until_s=110.0),
        "replicas": 2,
        "fleet_tokens_per_s": 1_000.0,
        "bounds_s": (1.0, 2.5),
        "both_s": (2.0, 0.2),
        "counts": {"preemptions": 3.0},
    }
    return figures(records, **(known | more))


def test_times_and_shares_of_answered_requests() -> None:
    found = told([record(number, ttft_s=float(number + 1)) for number in range(10)])
    assert (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s) == (5.5, 5.0, 9.0)
    assert (found.total_p50_s, found.total_p90_s) == (6.0, 10.0)
    assert found.output_token_mean_s == pytest.approx(0.1)
    assert found.met == {"1": 0.1, "2.5": 0.2}
    assert found.hits == {"gpu": 0.2, "cpu": 0.1, "disk": 0.0}
    assert (found.computed_tokens, found.counts) == (7_000, {"preemptions": 3.0})


def test_both_bounds_are_met_by_an_early_first_token_and_fast_further_ones() -> None:
    late, slow, one = record(0, ttft_s=3.0), record(1, total_s=5.0), record(2, output_tokens=1)
    assert told([late, slow, one, record(3), failed(4)]).met_both == pytest.approx(2 / 5)


def test_a_failure_is_an_infinite_time_in_quantiles_and_bounds_but_not_in_means() -> None:
    answered = [record(number) for number in range(8)]
    found = told([*answered, failed(8), failed(9, status=429)])
    assert (found.errors, found.refused, found.unsent) == (2, 1, 0)
    assert (found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s) == (1.0, None, None)
    assert (found.ttft_mean_s, found.met["2.5"]) == (1.0, 0.8)


def test_an_answer_that_broke_off_is_a_failure() -> None:
    found = told([record(0), record(1, error="the stream ended", ttft_s=0.5)])
    assert (found.errors, found.met["1"], found.total_p90_s) == (1, 0.5, None)


def test_a_request_that_was_never_sent_is_a_failure() -> None:
    found = told([record(0), record(1)], [0, 1, 2, 3])
    assert (found.requests, found.errors, found.unsent) == (4, 2, 2)
    assert (found.ttft_p50_s, found.ttft_p90_s) == (1.0, None)
    told_of = told([record(0), failed(1), failed(2, status=None, error="not sent: no answer")])
    assert (told_of.errors, told_of.unsent) == (2, 1)


def test_only_the_reported_requests_count_whenever_they_were_due() -> None:
    records = [record(0, ttft_s=9.0, due_s=20.0), record(1, ttft_s=2.0, due_s=500.0)]
    found = told(records, [1])
    assert (found.requests, found.ttft_p50_s) == (1, 2.0)


def test_played_load_is_that_of_the_window() -> None:
    records = [record(0, due_s=9.9), record(1, due_s=10.0), record(2, due_s=110.0)]
    assert told(records).played_load == pytest.approx(1_000 / (1_000.0 * 100))


def test_a_later_turn_elsewhere_has_moved_though_the_turn_before_is_not_reported() -> None:
    records = [
        record(0, instance_id="a"),
        record(1, turn=1, instance_id="b"),
        record(2, turn=2, instance_id="b", headers={"reason": "session-spill"}),
    ]
    found = told(records, [1, 2])
    assert (found.moved, found.spilled) == (0.5, 1.0)
    assert told([record(0)]).moved is None


def test_balance_is_the_busiest_replica_over_the_mean_of_all() -> None:
    assert told([record(0), record(1)]).balance == 2.0
    assert told([record(0), record(1, instance_id="b")]).balance == 1.0


def test_time_per_output_token_needs_two_tokens() -> None:
    found = told([record(0, output_tokens=1)])
    assert found.output_token_mean_s is None
    assert told([record(0, output_tokens=2)]).output_token_p90_s == pytest.approx(1.0)
    both = told([record(0, output_tokens=2), record(1), record(2)])
    assert both.output_token_p50_s == pytest.approx(0.1)


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(BenchError, match="no request to report"):
        told([record(0)], [])


def test_nothing_answered_leaves_no_times() -> None:
    found = told([failed(0)])
    assert (found.ttft_mean_s, found.ttft_p50_s, found.balance) == (None, None, None)
    assert not math.isnan(found.hits["gpu"])
