"""Figures, bound, costliest requests and plots, from records made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.record import Record, add_truth
from bench.replay.bound import no_queue
from bench.replay.figures import Figures, figures
from bench.replay.plots import waiting_tokens, write_plots
from bench.replay.report import costliest, costliest_table, table
from bench.workloads.session import Session, Span, Turn
from simulator.model.rates import Rates, Shape


def record(number: int, *, ttft_s: float = 1.0, **more: Any) -> Record:
    known: dict[str, Any] = {
        "session": None,
        "turn": 0,
        "prompt_tokens": 1000,
        "due_s": float(number),
        "sent_s": float(number),
        "total_s": ttft_s + 1,
        "answer_id": f"cmpl-{number}",
        "instance_id": "a",
        "cached_tokens": {"gpu": 200, "cpu": 100, "disk": 0},
        "arrived_s": float(number),
        "first_token_s": number + ttft_s,
        "finished_s": number + ttft_s + 1,
    }
    return Record(number=number, ttft_s=ttft_s, **(known | more))


def summary(records: list[Record], **more: Any) -> Figures:
    return figures("x", records, replicas=2, fleet_tokens_per_s=1000.0, **more)


def test_ttft_and_hits() -> None:
    told = summary([record(i, ttft_s=float(i + 1)) for i in range(10)])
    assert (told.ttft_mean_s, told.ttft_p50_s, told.ttft_p90_s) == (5.5, 5.0, 9.0)
    assert (told.hit_gpu, told.hit_cpu, told.hit_disk) == (0.2, 0.1, 0.0)
    assert told.replica_ttft_mean_s == pytest.approx(5.5)
    assert told.load == pytest.approx(10 * 1000 / 1000 / 9)
    assert (told.requests, told.errors) == (10, 0)


def test_errors_count_and_leave_the_other_figures_alone() -> None:
    failed = record(1, error="503: no", cached_tokens={})
    failed.ttft_s = None
    told = summary([record(0), failed])
    assert (told.errors, told.ttft_mean_s, told.hit_gpu) == (1, 1.0, 0.2)


def test_refused_requests_are_errors_and_told_apart() -> None:
    def failed(number: int, status: int | None) -> Record:
        return record(number, status=status, error="no", cached_tokens={})

    told = summary([record(0, status=200), failed(1, 429), failed(2, 503), failed(3, None)])
    assert (told.errors, told.refused) == (3, 1)


def test_latency_and_time_per_token() -> None:
    """Answers of 11 tokens, the first after one second: ten more in 1 and in 3 seconds."""
    records = [record(0, output_tokens=11), record(1, output_tokens=11, total_s=4.0)]
    told = summary([*records, record(2, output_tokens=1, total_s=1.0)])
    assert (told.latency_p50_s, told.latency_p90_s) == (2.0, 4.0)
    assert told.per_token_p50_s == pytest.approx(0.1)
    assert told.per_token_p90_s == pytest.approx(0.3)


def test_the_first_token_of_a_whole_answer_is_the_fleets() -> None:
    """The client has all of it after 9 seconds; the replica decoded for the last 5 of them."""
    whole = record(0, ttft_s=9.0, total_s=9.0, streamed=False)
    failed = record(1, ttft_s=9.0, total_s=9.0, streamed=False, error="cut")
    told = {
        "instance_id": "r7",
        "arrived_s": 101.0,
        "first_token_s": 103.0,
        "finished_s": 108.0,
        "prompt_tokens": 900,
        "cached_tokens": {},
    }
    add_truth([whole, failed], [told | {"request_id": "0"}, told | {"request_id": "1"}])
    assert (whole.ttft_s, failed.ttft_s) == (4.0, 9.0)


def test_nothing_answered_is_told_without_figures() -> None:
    told = summary([])
    assert (told.ttft_mean_s, told.balance, told.requests_per_s) == (None, None, None)


def test_balance_is_the_busiest_over_the_mean_of_all_replicas() -> None:
    records = [record(0), record(1), record(2, instance_id="b")]
    assert summary(records).balance == pytest.approx(2 * 2 / 3)
    # The second replica got nothing.
    assert summary(records[:2]).balance == pytest.approx(2.0)


def test_moved_and_spilled_turns() -> None:
    def turn(number: int, place: str, reason: str) -> Record:
        return record(
            number, session="s", turn=number, instance_id=place, headers={"reason": reason}
        )

    told = summary([turn(0, "a", "x"), turn(1, "b", "session-spill"), turn(2, "b", "session-home")])
    assert (told.moved, told.spilled) == (0.5, 0.5)
    alone = summary([record(0), record(1)])
    assert (alone.moved, alone.spilled) == (None, None)


def test_prefetch_in_time_and_wasted() -> None:
    headers = {"prefetch": "asked=4;promoted=3;pending=1;missing=0"}
    truth = [{"prefetch_unused_bytes": 10, "bytes_per_token": 2.0}] * 2
    told = summary([record(0, headers=headers), record(1)], truth=truth)
    assert (told.prefetch_asked_chunks, told.prefetch_in_time) == (4, 0.75)
    assert told.prefetch_wasted_bytes == 10 * 100_000


def test_the_truth_finds_its_record_by_the_answers_id() -> None:
    record_ = record(0, instance_id=None, cached_tokens={}, answer_id="cmpl-abc")
    told = {
        "request_id": "abc",
        "instance_id": "r7",
        "arrived_s": 1.0,
        "first_token_s": 3.0,
        "finished_s": 4.0,
        "prompt_tokens": 900,
        "cached_tokens": {"gpu": 64},
    }
    add_truth([record_, record(1)], [told])
    assert (record_.instance_id, record_.prompt_tokens) == ("r7", 900)
    assert record_.cached_tokens == {"gpu": 64, "cpu": 0, "disk": 0}
    assert record_.replica_ttft_s == 2.0


def test_the_bound_computes_what_was_never_sent() -> None:
    rates = Rates(prefill_tokens_per_s=1000.0, step_s=0.0, decode_s_per_sequence=0.01)
    shape = Shape(block_tokens=64)
    turns = (Turn((Span(1, 640),), 65), Turn((Span(2, 100),), 1, 5.0))
    sessions = [Session(0.0, turns, "s"), Session(1.0, (Turn((Span(1, 640),), 1),))]
    first, second, other = no_queue(sessions, rates, shape)
    assert first.ttft_s == pytest.approx(0.64)
    # Its answer's KV is there too: 705 of 805 tokens, in whole blocks 704.
    assert second.ttft_s == pytest.approx(0.101)
    assert second.due_s == pytest.approx(0.64 + 0.64 + 5.0)
    # The last token is always computed: nine blocks of ten.
    assert other.cached_tokens["gpu"] == 576
    assert [each.number for each in (first, second, other)] == [0, 1, 2]


def test_the_costliest_requests_come_with_both_decisions() -> None:
    headers = {"reason": "longest-match", "matched-gpu": "128", "predicted-ttft-ms": "250.0"}
    mine = [record(0, ttft_s=1.0), record(1, ttft_s=9.0, headers=headers), record(2, ttft_s=4.0)]
    oracle = [record(i, ttft_s=1.0, instance_id="b", predicted_ttft_s=0.9) for i in range(3)]
    first, second = costliest(mine, oracle, 2, speed=4.0)
    assert (first.number, first.lost_s, second.number) == (1, 8.0, 2)
    assert first.ours["predicted_ttft_s"] == pytest.approx(1.0)
    assert first.ours["matched_tokens"] == {"gpu": 128, "cpu": 0, "disk": 0}
    assert first.oracle["replica"] == "b"
    assert "longest-match" in costliest_table([first])


def test_the_table_has_a_line_for_who_could_not_run() -> None:
    lines = table("title", [summary([record(0)]), Figures(contender="y", why_not="no wheel")])
    assert f"{'y':<26} no wheel" in lines
    assert len({len(line) for line in lines.splitlines()[1:3]}) == 1


def test_waiting_tokens_by_replica() -> None:
    records = [record(0, ttft_s=10.0), record(0, ttft_s=10.0), record(0, instance_id="b")]
    times, means, worst = waiting_tokens(records)
    assert (times[0], means[0], worst[0]) == (0.0, 1500.0, 2000.0)
    assert (means[-1], worst[-1]) == (1000.0, 2000.0)


def test_plots_are_written(tmp_path: Path) -> None:
    unlucky = replace(record(0), arrived_s=None, cached_tokens={})
    runs = {"ours": [record(0), record(1)], "other": [unlucky], "none": []}
    written = write_plots(tmp_path, "rounds, scarce cpu, load 0.8: 2 requests", runs)
    assert [path.name for path in written] == [
        "rounds-scarcecpu-load0.8-ttft.png",
        "rounds-scarcecpu-load0.8-hits.png",
        "rounds-scarcecpu-load0.8-load.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
