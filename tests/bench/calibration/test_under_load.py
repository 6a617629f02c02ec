"""Calibration under load: the workload, the client, what is counted and how it is compared."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.calibration.replica import TOKENS, start_simulated_fleet
from bench.calibration.under_load.__main__ import (
    MACHINE,
    SIMULATED,
    play_all,
    report,
    workloads,
)
from bench.calibration.under_load.client import answer_ids, note_answer
from bench.calibration.under_load.counts import Counts, removed_from_gpu
from bench.calibration.under_load.model import play_in_model_time, with_rates
from bench.calibration.under_load.report import (
    REAL,
    Seed,
    as_json,
    is_close,
    place_of,
    ratio_of,
    table,
)
from bench.calibration.under_load.stage import Played, router_rates, start_router
from bench.calibration.under_load.workload import (
    TURNS,
    Offered,
    offered,
    prefill_s,
    token_ids,
)
from bench.record import Record
from bench.simulator.model.machine import Machine
from bench.simulator.model.rates import Rates
from bench.workloads.session import Span
from router.processes import ProcessGroup

RATES = Rates(
    step_s=0.008,
    decode_s_per_sequence=0.0006,
    prefill_tokens_per_s=9_900.0,
    attention_tokens=2_000.0,
)
CORE = replace(MACHINE, rates=RATES)


def _offered(machine: Machine = CORE, *, load: float = 0.8, seed: int = 1) -> Offered:
    return offered(machine, replicas=2, load=load, warm_up_s=60.0, window_s=240.0, seed=seed)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_load_is_what_it_is_called(load: float, seed: int) -> None:
    assert _offered(load=load, seed=seed).real_load == pytest.approx(load, rel=0.03)


def test_a_slower_machine_is_sent_less_and_is_as_loaded() -> None:
    slower = replace(CORE, rates=RATES.slowed(2.0))
    fast, slow = _offered(), _offered(slower)
    assert slow.real_load == pytest.approx(fast.real_load, rel=0.03)
    assert len(slow.reported) < 0.6 * len(fast.reported)


def test_the_load_counts_what_an_infinite_cache_leaves() -> None:
    one = _offered()
    assert one.raw_load > 2 * one.real_load
    assert 0 < one.decode_load < one.real_load / 2


def test_reported_requests_are_due_in_the_window_and_numbered_session_by_session() -> None:
    found = _offered()
    starts_s = [each.start_s for each in found.sessions]
    assert starts_s == sorted(starts_s)
    assert all(len(each.turns) == TURNS for each in found.sessions)
    assert max(found.reported) < TURNS * len(found.sessions)
    firsts = {number for number in found.reported if number % TURNS == 0}
    assert firsts == {
        TURNS * index
        for index, start_s in enumerate(starts_s)
        if found.warm_up_s <= start_s < found.end_s
    }


def test_no_prompt_is_longer_than_a_replica_takes_and_no_two_documents_are_equal() -> None:
    found = _offered()
    longest = max(
        sum(turn.tokens + turn.output_tokens for turn in each.turns) for each in found.sessions
    )
    assert longest < MACHINE.shape.gpu_tokens / 2
    numbers = [span.number for each in found.sessions for turn in each.turns for span in turn.spans]
    own = [number for number in numbers if number]
    assert len(own) == len(set(own))


def test_the_same_seed_is_the_same_sessions_and_the_same_tokens() -> None:
    assert _offered() == _offered()
    assert _offered(seed=2).sessions != _offered().sessions
    span = Span(7, 40)
    assert token_ids(span, seed=1) == token_ids(span, seed=1)
    assert token_ids(span, seed=1) != token_ids(span, seed=2)
    assert set(token_ids(Span(3, 5_000), seed=1)) <= set(TOKENS)


def test_a_prefill_takes_a_step_for_each_batch() -> None:
    shape = MACHINE.shape
    rates = replace(RATES, attention_tokens=0.0)
    assert prefill_s(rates, shape, 2048, 0) == pytest.approx(0.008 + 2048 / 9_900)
    assert prefill_s(rates, shape, 2049, 0) == pytest.approx(0.016 + 2049 / 9_900)
    assert prefill_s(RATES, shape, 100, 4_000) > 2.5 * prefill_s(rates, shape, 100, 4_000) - 0.016


def _stream(*events: Mapping[str, object]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events) + (
        b"data: [DONE]\n\n"
    )


def _record(**fields: object) -> Record:
    given = {"number": 0, "session": "user-0", "turn": 0, "prompt_tokens": 100, "due_s": 0.0}
    return Record(**(given | fields))  # type: ignore[arg-type]


def test_an_answers_tokens_are_vllms_own_or_the_simulators_words() -> None:
    real = _stream(
        {"choices": [{"text": "a", "token_ids": [17]}]},
        {"choices": [{"text": " b", "token_ids": [18, 19]}]},
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}},
    )
    assert answer_ids(real) == [17, 18, 19]
    assert answer_ids(_stream({"choices": [{"text": "baba babe"}]})) == [0, 1]


def test_an_answer_tells_its_cached_tokens() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 64}}
    record = _record(status=200, ttft_s=0.5, headers={"replica": "real1"})
    note_answer(record, _stream({"choices": []}, {"choices": [], "usage": usage}))
    assert (record.ok, record.computed_tokens, record.instance_id) == (True, 36, "real1")


@pytest.mark.parametrize(
    ("status", "stream", "why"),
    [
        (429, b'{"error": "later"}', "429"),
        (200, b'data: {"choices": []}\n\n', "broke off"),
    ],
)
def test_what_is_no_whole_answer_has_no_ttft(status: int, stream: bytes, why: str) -> None:
    record = _record(status=status, ttft_s=0.5)
    note_answer(record, stream)
    assert not record.ok
    assert why in str(record.error)


def test_only_what_leaves_the_gpu_counts_as_evicted_there() -> None:
    def removed(hashes: list[int], **where: str) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": hashes, **where}

    events = [
        removed([1, 2], medium="GPU"),
        removed([3], medium="CPU"),
        removed([4]),
        {"type": "BlockStored", "block_hashes": [5], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    assert removed_from_gpu(msgspec.msgpack.encode([0.0, events, 0])) == 3


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "cold"),
        ({"matched-gpu": "40", "matched-disk": "0"}, "cold"),
        ({"matched-gpu": "60", "matched-cpu": "0"}, "gpu"),
        ({"matched-gpu": "30", "matched-cpu": "30"}, "cpu"),
        ({"matched-gpu": "30", "matched-cpu": "30", "matched-disk": "10"}, "disk"),
    ],
)
def test_a_request_belongs_to_the_slowest_tier_that_it_needs(
    headers: dict[str, str], expected: str
) -> None:
    assert place_of(_record(headers=headers)) == expected


def _seed(number: int, *, factor: float, missing: int | None = None) -> Seed:
    """Sessions of two requests each, simulated ones taking ``factor`` times as long."""

    def played(factor: float, *, leave_out: int | None) -> Played:
        records = [
            _record(
                number=each,
                session=f"user-{each // 2}",
                turn=each % 2,
                status=200,
                ttft_s=factor * (0.1 + 0.01 * each),
                cached_tokens={"all": 50},
            )
            for each in range(100)
            if each != leave_out
        ]
        return Played(records=records, counts=Counts(), gpu_evicted_blocks=0, idle_share=0.2)

    work = replace(_offered(), reported=frozenset(range(90)))
    return Seed(
        seed=number,
        offered=work,
        played={
            REAL: played(1.0, leave_out=None),
            SIMULATED: played(factor, leave_out=missing),
        },
    )


def test_close_is_within_a_fifth_at_both_quantiles_over_the_seeds() -> None:
    assert is_close([_seed(1, factor=1.19), _seed(2, factor=1.1)], SIMULATED)
    assert not is_close([_seed(1, factor=1.3), _seed(2, factor=1.2)], SIMULATED)
    assert not is_close([_seed(1, factor=0.7)], SIMULATED)
    found = ratio_of([_seed(1, factor=1.1), _seed(2, factor=0.9)], SIMULATED, 0.5)
    assert found is not None
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(math.sqrt(1.1 * 0.9))


def test_only_reported_requests_count_and_a_report_is_json() -> None:
    seeds = [_seed(1, factor=1.0, missing=5)]
    told = json.loads(json.dumps(as_json(seeds), allow_nan=False))
    (first,) = told["seeds"]
    assert first["fleets"][REAL]["answered"] == 90
    assert first["fleets"][SIMULATED]["answered"] == 89
    assert first["ttft_ratio_to_real"][SIMULATED]["p90"]["low"] > 0.5
    assert told["ttft_ratio_to_real"][SIMULATED]["p50"]["low"] is None, "one seed tells no interval"
    assert "within 20% at p50 and p90" in table(seeds)


def test_a_router_is_told_the_same_rates_whatever_a_token_weighs() -> None:
    rates = {
        "prefill_tokens_per_s": 5_000.0,
        "load_tokens_per_s": 400_000.0,
        "disk_tokens_per_s": 100_000.0,
    }
    real, simulated = router_rates(rates, 8192.0), router_rates(rates, 1.0)
    for name in ("cpu_load_bytes_per_s", "disk_bytes_per_s"):
        assert real[name] / real["kv_bytes_per_token"] == simulated[name]
    assert real["prefill_tokens_per_s"] == simulated["prefill_tokens_per_s"]


def test_sessions_go_through_a_router_to_the_end_and_all_that_they_do_is_counted(
    tmp_path: Path,
) -> None:
    """Before a simulated fleet; the same runs before a real one."""
    rates = {
        "step_s": 0.001,
        "prefill_tokens_per_s": 100_000.0,
        "load_tokens_per_s": 1e6,
        "disk_tokens_per_s": 1e6,
    }
    arguments = argparse.Namespace(load=0.1, seeds=1, seed=3, rounds=1, warm_up_s=0.5, window_s=1.5)
    work_of = workloads(arguments, rates)
    work_of[3] = _hurried(work_of[3])
    with ProcessGroup() as group:
        fleet = start_simulated_fleet(group, tmp_path, MACHINE, rates, replicas=2)
        url = start_router(group, tmp_path, "router", fleet, rates)
        first = play_all(fleet, url, work_of, REAL)
        second = play_all(fleet, url, work_of, SIMULATED)
    records = first[3].records
    assert len(records) == TURNS * len(work_of[3].sessions)
    assert not [each.error for each in records if not each.ok]
    assert {each.instance_id for each in records} <= {"sim1", "sim2"}
    assert all(each.cached_tokens["all"] > 0 for each in records if each.turn)
    for played in (first[3], second[3]):  # the second began with empty caches as well
        assert played.counts.stored_bytes > 0
        hits = sum(sum(each.cached_tokens.values()) for each in played.records)
        counts = played.counts
        assert counts.gpu_hit_tokens + counts.cpu_hit_tokens + counts.disk_hit_tokens == hits
    seeds = [Seed(seed=3, offered=work_of[3], played={REAL: first[3], SIMULATED: second[3]})]
    told = report(arguments, {"rates": rates}, seeds)
    assert told["command"] == (
        "python -m bench.calibration.under_load --load 0.1 --seeds 1 --seed 3 --rounds 1 "
        "--warm-up-s 0.5 --window-s 1.5"
    )


def test_the_model_plays_the_same_requests_and_the_servers_own_time_is_added() -> None:
    work = offered(CORE, replicas=2, load=0.8, warm_up_s=5.0, window_s=20.0, seed=4)
    slow_server = replace(CORE, rates=replace(RATES, request_s=0.5))
    plain = play_in_model_time(CORE, work, replicas=2, seed=4)
    later = play_in_model_time(slow_server, work, replicas=2, seed=4)
    assert [each.number for each in plain.records] == list(range(TURNS * len(work.sessions)))
    assert all(each.ok for each in plain.records)
    hits = sum(sum(each.cached_tokens.values()) for each in plain.records)
    counts = plain.counts
    assert counts.gpu_hit_tokens + counts.cpu_hit_tokens + counts.disk_hit_tokens == hits > 0
    for one, other in zip(plain.records, later.records, strict=True):
        assert one.ttft_s is not None
        assert other.ttft_s == pytest.approx(one.ttft_s + 0.5)


def test_rates_that_the_model_does_not_know_are_left_out() -> None:
    machine = with_rates(MACHINE, {"step_s": 0.5, "of_another_kind": 1.0})
    assert machine.rates == Rates(step_s=0.5)
    assert machine.shape == MACHINE.shape


def _hurried(work: Offered) -> Offered:
    """The same sessions, asking a hundred times as soon."""
    sessions = [
        replace(
            each,
            turns=tuple(replace(turn, pause_s=turn.pause_s / 100) for turn in each.turns),
        )
        for each in work.sessions
    ]
    return replace(work, sessions=sessions)
