"""Calibration under load: the workload, the client, what is counted and how it is compared."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from bench.calibration.replica import TOKENS, start_simulated_fleet
from bench.calibration.under_load import fitting
from bench.calibration.under_load.__main__ import (
    MACHINE,
    MODEL,
    SIMULATED,
    main,
    workload,
)
from bench.calibration.under_load.client import answer_ids, note_answer
from bench.calibration.under_load.counts import Counts, removed_from_gpu
from bench.calibration.under_load.fitting import PREFILL
from bench.calibration.under_load.kept import RealRun, read_real, write_real
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
from bench.calibration.under_load.stage import Played, play, router_rates, start_router
from bench.calibration.under_load.workload import TURNS, Offered, offered, token_ids
from bench.record import Record
from bench.ttft import BenchError
from bench.workloads.session import Span
from router.launch.processes import ProcessGroup
from simulator.model.machine import Machine
from simulator.model.rates import Rates

RATES = Rates(
    step_s=0.008,
    decode_s_per_sequence=0.0006,
    prefill_tokens_per_s=9_900.0,
    attention_tokens=2_000.0,
)
CORE = replace(MACHINE, rates=RATES)


def _offered(machine: Machine = CORE, *, load: float = 0.8, seed: int = 1) -> Offered:
    return offered(machine, replicas=2, load=load, requests=400, seed=seed)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_load_is_what_it_is_called(load: float, seed: int) -> None:
    found = _offered(load=load, seed=seed)
    assert found.real_load == pytest.approx(load, rel=0.03)
    assert found.raw_load > 2 * found.real_load
    assert len(found.reported) == 400


def test_a_slower_machine_is_sent_the_same_work_in_more_time() -> None:
    slower = replace(CORE, rates=RATES.slowed(2.0))
    fast, slow = _offered(), _offered(slower)
    assert slow.real_load == pytest.approx(fast.real_load, rel=0.03)
    assert slow.end_s - slow.warm_up_s > 1.7 * (fast.end_s - fast.warm_up_s)


def test_no_prompt_is_longer_than_a_replica_takes_and_no_two_documents_are_equal() -> None:
    found = _offered()
    assert all(len(each.turns) == TURNS for each in found.sessions)
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


def _run(played: Mapping[int, Played], *, requests: int = 400) -> RealRun:
    return RealRun(
        machine={"commit": "abc"},
        load=0.8,
        requests=requests,
        rounds=1,
        times={},
        rates=asdict(RATES),
        played=played,
    )


def test_what_the_real_replicas_did_is_kept_whole(tmp_path: Path) -> None:
    run = _run({3: _seed(3, factor=1.0).played[REAL]})
    path = tmp_path / "new" / "real.json.gz"
    write_real(path, run)
    assert read_real(path) == run


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b damaged"])
def test_a_file_that_holds_no_run_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "real.json.gz"
    path.write_bytes(content)
    with pytest.raises(BenchError, match=r"real\.json\.gz"):
        read_real(path)


def test_a_kept_run_is_compared_with_the_model_at_other_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the real run was the model itself: the same rates give the same, others do not."""
    work = workload(_run({}, requests=60), 4)
    played = play_in_model_time(CORE, work, replicas=2, seed=4)
    path = tmp_path / "real.json.gz"
    write_real(path, _run({4: played}, requests=60))
    arguments = ["--real", str(path), "--fleet", MODEL]
    assert main(arguments) == 0
    assert "model/real TTFT p90: 1.00" in capsys.readouterr().out
    out = tmp_path / "out.json"
    assert main([*arguments, "--rate", "prefill_tokens_per_s=3000", "--json", str(out)]) == 1
    assert "not within 20%" in capsys.readouterr().out
    told = json.loads(out.read_text())
    assert told["other_rates"] == {"prefill_tokens_per_s": 3000.0}
    assert told["measured_rates"]["prefill_tokens_per_s"] == RATES.prefill_tokens_per_s
    assert told["within_tolerance"] == {MODEL: False}
    assert told["command"].endswith("--load 0.8 --requests 60 --rounds 1 --seed 4 --seeds 1")


def test_rates_are_fitted_on_the_first_seed_and_the_others_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the real replicas were a fifth slower than the times taken of one alone."""
    # Each candidate is a play of seconds: the nearest ones, and one far off.
    monkeypatch.setattr(fitting, "SLOWDOWNS", (1.0, 1.175, 1.2, 1.225))
    monkeypatch.setattr(fitting, "LONGER_STEPS", (1.0, 1.5))
    truth = with_rates(CORE, {**asdict(RATES), PREFILL: RATES.prefill_tokens_per_s / 1.2})
    run = _run({}, requests=60)
    played = {
        seed: play_in_model_time(truth, workload(run, seed), replicas=2, seed=seed)
        for seed in (4, 5)
    }
    path, out = tmp_path / "real.json.gz", tmp_path / "out.json"
    write_real(path, _run(played, requests=60))
    arguments = ["--real", str(path), "--fleet", MODEL, "--fit", "--json", str(out)]
    assert main(arguments) == 0
    told = json.loads(out.read_text())
    assert told["fitted_on"] == [4]
    assert told["command"].endswith("--seed 4 --seeds 2 --fit")
    assert [each["seed"] for each in told["seeds"]] == [5]
    assert told["other_rates"] == {PREFILL: pytest.approx(RATES.prefill_tokens_per_s / 1.2)}
    assert told["ttft_ratio_to_real"][MODEL]["p90"]["value"] == pytest.approx(1.0)

    write_real(path, _run({4: played[4]}, requests=60))
    assert main(arguments) == 1
    assert "--seeds must be 2 or more" in capsys.readouterr().err


def test_a_rate_that_there_is_none_of_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rate", "courage=1"])
    assert "there is no rate courage" in capsys.readouterr().err


def test_the_model_plays_the_same_requests_and_the_servers_own_time_is_added() -> None:
    work = offered(CORE, replicas=2, load=0.8, requests=60, seed=4)
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


def test_sessions_go_through_a_router_to_the_end_and_all_that_they_do_is_counted(
    tmp_path: Path,
) -> None:
    """Before a simulated fleet; the same runs before a real one."""
    rates = asdict(RATES.slowed(0.05))
    work = _hurried(_offered(seed=3), sessions=8)
    with ProcessGroup() as group:
        fleet = start_simulated_fleet(group, tmp_path, MACHINE, rates, replicas=2)
        url = start_router(group, tmp_path, "router", fleet, rates)
        twice = [play(fleet, url, work, seed=3) for _ in range(2)]
    for played in twice:  # the second began with empty caches as well
        records = played.records
        assert len(records) == TURNS * len(work.sessions)
        assert not [each.error for each in records if not each.ok]
        assert {each.instance_id for each in records} <= {"sim1", "sim2"}
        assert all(each.cached_tokens["all"] > 0 for each in records if each.turn)
        assert played.counts.stored_bytes > 0
        hits = sum(sum(each.cached_tokens.values()) for each in records)
        counts = played.counts
        assert counts.gpu_hit_tokens + counts.cpu_hit_tokens + counts.disk_hit_tokens == hits


def _hurried(work: Offered, *, sessions: int) -> Offered:
    """Some of the sessions, all starting in a second and asking again at once."""
    some = [
        replace(
            each,
            start_s=index / sessions,
            turns=tuple(replace(turn, pause_s=turn.pause_s / 100) for turn in each.turns),
        )
        for index, each in enumerate(work.sessions[:sessions])
    ]
    return replace(work, sessions=some)
