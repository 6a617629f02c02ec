"""Figures are what the rounds' samples say, each compared within its own round."""

from typing import Any

import pytest

from bench.overhead.cases import Case
from bench.overhead.contenders import BARE_PROXY, DIRECT
from bench.overhead.figures import Sample, Spread, Used, figures, sample
from bench.overhead.load_generator import Outcome
from bench.overhead.report import as_json, case_figures, table
from bench.overhead.rounds import Results, rotated

CASE = Case(prompt="1k", answer="piece", requests=100)


def one(number: int = 0, **changed: Any) -> Sample:
    values: dict[str, Any] = {
        "round": number,
        "requests": 100,
        "errors": 0,
        "first_error": None,
        "elapsed_s": 2.0,
        "cpu_s": 0.1,
        "stream_bytes": None,
        "load_cpu_s": 0.5,
        "replicas_cpu_s": 0.2,
        "first_p50_s": 0.010,
        "first_p99_s": 0.020,
        "whole_p50_s": 0.011,
        "whole_p99_s": 0.021,
        "late_p99_s": None,
    }
    return Sample(**{**values, **changed})


def spread(median: float, low: float, high: float) -> Any:
    return pytest.approx({"median": median, "low": low, "high": high})


def shown(value: Spread | None) -> dict[str, float]:
    assert value is not None
    return {"median": value.median, "low": value.low, "high": value.high}


def test_a_sample_is_made_of_what_the_load_generator_saw_and_what_was_used() -> None:
    outcome = Outcome(
        first_s=(0.1, 0.2, 0.3),
        whole_s=(0.2, 0.3, 0.4),
        errors=2,
        first_error="503: busy",
        elapsed_s=1.5,
        cpu_s=0.25,
        late_s=(),
    )
    taken = sample(4, outcome, Used(cpu_s=0.75, stream_bytes=2048.0, replicas_cpu_s=0.125))
    assert (taken.round, taken.requests, taken.errors) == (4, 3, 2)
    assert (taken.first_p50_s, taken.whole_p50_s, taken.whole_p99_s) == (0.2, 0.3, 0.4)
    assert (taken.cpu_s, taken.load_cpu_s, taken.replicas_cpu_s) == (0.75, 0.25, 0.125)
    assert taken.late_p99_s is None


def test_a_sample_without_an_answer_has_no_latency() -> None:
    outcome = Outcome(
        first_s=(), whole_s=(), errors=9, first_error="x", elapsed_s=1, cpu_s=0, late_s=(0.1,)
    )
    taken = sample(0, outcome, Used(cpu_s=1.0, stream_bytes=None, replicas_cpu_s=0.0))
    assert (taken.requests, taken.first_p50_s, taken.late_p99_s) == (0, None, 0.1)
    assert figures("a", [taken]).cpu_ms is None


def test_cpu_is_told_by_request_and_in_those_of_the_proxy_of_the_same_round() -> None:
    mine = [one(0, cpu_s=0.2), one(1, cpu_s=0.4, requests=50), one(2, cpu_s=0.3)]
    proxy = [one(0, cpu_s=0.1), one(1, cpu_s=0.2), one(2, cpu_s=0.2)]
    found = figures("mine", mine, proxy=proxy)
    assert shown(found.cpu_ms) == spread(3.0, 2.0, 8.0)
    assert shown(found.cpu_to_proxy) == spread(2.0, 1.5, 4.0)
    assert (found.rounds, found.requests) == (3, 250)


def test_latency_is_what_is_added_to_direct_round_by_round() -> None:
    mine = [one(0, first_p50_s=0.011), one(1, first_p50_s=0.052), one(2, first_p50_s=0.013)]
    direct = [one(0, first_p50_s=0.010), one(1, first_p50_s=0.050), one(2, first_p50_s=0.010)]
    assert shown(figures("mine", mine, direct=direct).first_p50_ms) == spread(2.0, 1.0, 3.0)
    assert shown(figures("mine", mine).first_p50_ms) == spread(13.0, 11.0, 52.0)


def test_a_round_that_the_other_has_not_is_compared_with_nothing() -> None:
    found = figures("mine", [one(0), one(1)], direct=[one(1, first_p50_s=0.004)], proxy=[])
    assert shown(found.first_p50_ms) == spread(6.0, 6.0, 6.0)
    assert found.cpu_to_proxy is None


def test_shares_and_rates_are_of_the_time_that_the_case_took() -> None:
    found = figures("mine", [one(0, stream_bytes=20480.0), one(1, elapsed_s=4.0)])
    assert shown(found.requests_per_s) == spread(37.5, 25.0, 50.0)
    assert shown(found.load_cpu_share) == spread(0.1875, 0.125, 0.25)
    assert shown(found.stream_kib) == spread(20.0, 20.0, 20.0)


def results() -> Results:
    kept = Results()
    for number in range(2):
        kept.add(CASE.name, BARE_PROXY, one(number, cpu_s=0.05))
        kept.add(CASE.name, "ours-text", one(number, cpu_s=0.1 + number / 10, whole_p99_s=0.5))
        kept.add(CASE.name, DIRECT, one(number, cpu_s=None, whole_p99_s=0.25))
    kept.add(CASE.name, "failing", one(0, requests=0, errors=3, first_error="503: busy"))
    return kept


NAMES = (DIRECT, BARE_PROXY, "ours-text", "failing", "never-started")


def test_the_table_has_a_row_for_each_contender_that_ran_in_their_order() -> None:
    rows = table(CASE, case_figures(results(), CASE, NAMES)).splitlines()
    assert [row.split()[0] for row in rows] == [CASE.name, *NAMES[:-1]]
    assert "250.0" in rows[1]
    assert "+250.0" in rows[3]
    assert "1.50 (1.00..2.00)" in rows[3]
    assert rows[4].endswith("3 errors: 503: busy")


def test_the_report_has_the_samples_that_its_figures_are_made_of() -> None:
    (case,) = as_json(results(), [CASE, Case(prompt="64k", answer="whole", requests=1)], NAMES)
    ours = next(each for each in case["contenders"] if each["contender"] == "ours-text")
    assert (case["case"], case["requests"]) == ("1k-piece", 100)
    assert ours["cpu_to_proxy"] == spread(3.0, 2.0, 4.0)
    assert [each["cpu_s"] for each in ours["samples"]] == [0.1, 0.2]


def test_the_order_begins_with_another_one_each_time_and_leaves_nobody_out() -> None:
    orders = [rotated("abc", by) for by in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []
