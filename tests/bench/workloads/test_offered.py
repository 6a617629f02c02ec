"""Loads are what they are called: measured again from the sessions, by another way than the pacer.

Sizes here are small for speed: 4 replicas, 1,500 reported requests (published
results have 5,000 and more), where single sessions weigh more than there.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.ttft import BenchError
from bench.workloads.ideal import no_queue
from bench.workloads.offered import GENERATED, Offered, offered
from bench.workloads.resources import DECODE_SLOTS, DISK, KV_MEMORY, PREFILL, REPLICA_TIME
from replay.record import Record
from simulator.model.replica_machine import Machine, Shape

MACHINE = Machine(shape=Shape(gpu_tokens=600_000), cpu_tokens=100_000)
REPLICAS = 4
REQUESTS = 1_500
LOADS = (0.5, 0.8, 0.95, 1.1)


def of(workload: str, load: float = 0.8, **more: Any) -> Offered:
    known: dict[str, Any] = {"requests": REQUESTS, "seed": 1, "replicas": REPLICAS}
    return offered(workload, load=load, **({"machine": MACHINE} | known | more))


@cache
def usual(workload: str, load: float) -> Offered:
    """Made once for all tests that look at it."""
    return of(workload, load)


def ideal(found: Offered, machine: Machine = MACHINE) -> list[Record]:
    return no_queue(found.sessions, machine.rates, machine.shape)


def in_window(found: Offered, records: list[Record]) -> list[Record]:
    return [each for each in records if found.warm_up_s <= each.due_s < found.end_s]


def replica_s(reported: list[Record], machine: Machine = MACHINE) -> float:
    """What requests take of replicas' time: prefill, the steps that carry it, and decodes."""
    rates, seconds = machine.rates, 0.0
    for each in reported:
        seconds += rates.prefill_s(each.computed_tokens, each.cached_tokens["gpu"])
        seconds += each.computed_tokens / machine.shape.max_batched_tokens * rates.step_s
        seconds += each.output_tokens * rates.decode_s_per_sequence
    return seconds


@pytest.mark.parametrize("workload", GENERATED)
@pytest.mark.parametrize("load", LOADS)
def test_the_measured_load_is_the_label(workload: str, load: float) -> None:
    found = usual(workload, load)
    assert found.real_load == pytest.approx(load, rel=0.03)
    reported = in_window(found, ideal(found))
    prefilled_s = sum(each.computed_tokens for each in reported) / 8_000.0
    offered_s = REPLICAS * (found.end_s - found.warm_up_s)
    assert replica_s(reported) / offered_s == pytest.approx(load, rel=0.03)
    assert prefilled_s / offered_s == pytest.approx(found.utilization[PREFILL], rel=0.03)
    raw_s = sum(each.prompt_tokens for each in reported) / 8_000.0
    assert raw_s / offered_s == pytest.approx(found.raw_load, rel=0.001)
    assert found.utilization[PREFILL] < found.real_load == found.crowded[REPLICA_TIME]


@pytest.mark.parametrize("workload", GENERATED)
def test_the_window_has_the_requests_asked_for_after_a_warm_up(workload: str) -> None:
    found = usual(workload, 0.8)
    records = ideal(found)
    assert [each.number for each in in_window(found, records)] == list(found.reported)
    # Requests that are due at the same moment as the last are in it, too.
    assert REQUESTS <= len(found.reported) < REQUESTS + 100
    assert sum(each.due_s < found.warm_up_s for each in records) >= 1_000
    starts_s = [each.start_s for each in found.sessions]
    assert starts_s == sorted(starts_s)
    assert starts_s[-1] < found.end_s
    measured = found.measured(records)
    assert [each.number for each in measured] == list(found.reported)


@pytest.mark.parametrize("workload", ["agents", "rounds", "mixture"])
def test_sessions_are_long_under_way_when_the_window_begins(workload: str) -> None:
    """Not fewer than at its end, but for chance: the run is in steady state."""
    found = of(workload, requests=3_000)
    ends_s: dict[str | None, float] = {}
    for each in ideal(found):
        assert each.total_s is not None
        ends_s[each.session] = each.due_s + each.total_s

    def alive(at_s: float) -> int:
        begun = (each for each in found.sessions if each.name and each.start_s <= at_s)
        return sum(ends_s[each.name] > at_s for each in begun)

    length_s = found.end_s - found.warm_up_s
    times_s = [found.warm_up_s + share / 8 * length_s for share in range(8)]
    counts = [alive(at_s) for at_s in times_s]
    assert sum(counts[:4]) == pytest.approx(sum(counts[4:]), rel=0.25)


@pytest.mark.parametrize("workload", ["agents", "rounds", "mixture"])
def test_no_turn_is_due_before_the_answer_before_has_ended(workload: str) -> None:
    found = usual(workload, 0.8)
    ended_s: dict[str | None, tuple[int, float]] = {}
    turns = {each.name: each.turns for each in found.sessions}
    for each in ideal(found):
        if each.turn:
            before, at_s = ended_s[each.session]
            pause_s = turns[each.session][each.turn].pause_s
            assert before == each.turn - 1
            assert each.due_s == pytest.approx(at_s + pause_s)
        assert each.total_s is not None
        if each.session is not None:
            ended_s[each.session] = (each.turn, each.due_s + each.total_s)


@pytest.mark.parametrize("workload", GENERATED)
def test_a_seed_gives_the_same_sessions_and_another_one_others(workload: str) -> None:
    first, again, other = (of(workload, seed=seed, requests=600) for seed in (1, 1, 2))
    assert first == again
    assert first.sessions != other.sessions


def test_attention_is_counted_in_seconds_of_prefill() -> None:
    """Where long contexts cost more, the same label leaves room for fewer tokens."""
    rates = replace(MACHINE.rates, attention_tokens=100_000.0)
    machine = replace(MACHINE, rates=rates)
    found = of("agents", machine=machine)
    reported = in_window(found, ideal(found, machine))
    seconds = replica_s(reported, machine)
    tokens = sum(each.computed_tokens for each in reported)
    offered_s = REPLICAS * (found.end_s - found.warm_up_s)
    assert seconds / offered_s == pytest.approx(0.8, rel=0.03)
    assert tokens / 8_000 / offered_s < 0.6


def test_stretched_pauses_make_the_working_set_larger_at_the_same_load() -> None:
    small, large = usual("agents", 0.5), of("agents", 0.5, pause_scale=8.0)
    assert small.real_load == pytest.approx(large.real_load, rel=0.03)
    assert large.working_set_s > 3 * small.working_set_s
    assert large.working_set_ratio > 3 * small.working_set_ratio
    assert small.cache_tokens == REPLICAS * 700_000
    # What is pushed out of GPU and CPU before it is used again has to come from disk.
    assert large.utilization[DISK] > 10 * small.utilization[DISK]


def test_without_reuse_nothing_comes_from_disk_and_loads_are_equal() -> None:
    found = usual("unique", 0.8)
    assert found.utilization[DISK] == 0.0
    assert found.raw_load == pytest.approx(found.utilization[PREFILL])
    assert found.binds == PREFILL


def test_where_decodes_and_prefill_share_steps_more_memory_is_held() -> None:
    idle, busy = (usual("agents", load) for load in (0.2, 0.95))
    assert idle.crowded[KV_MEMORY] == pytest.approx(idle.utilization[KV_MEMORY], rel=0.35)
    assert busy.crowded[KV_MEMORY] > 2 * busy.utilization[KV_MEMORY]
    assert busy.crowded_binds == KV_MEMORY
    for found in (idle, busy):
        assert found.crowded[DECODE_SLOTS] > found.utilization[DECODE_SLOTS]


def test_requests_hold_kv_memory_for_as_long_as_they_are_answered() -> None:
    """By hand: prompts of which nothing is shared, so held tokens are rate x size x time."""
    found = usual("unique", 0.5)
    reported = in_window(found, ideal(found))
    length_s = found.end_s - found.warm_up_s
    token_s = sum(
        (each.prompt_tokens + each.output_tokens / 2) * (each.total_s or 0.0) for each in reported
    )
    by_hand = token_s / length_s / (REPLICAS * MACHINE.shape.gpu_tokens)
    assert found.utilization[KV_MEMORY] == pytest.approx(by_hand, rel=0.15)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (Machine(shape=Shape(gpu_tokens=150_000)), "kv_memory is offered"),
        (Machine(shape=Shape(gpu_tokens=60_000)), "a GPU cache holds 60000; give it more"),
        (
            Machine(shape=Shape(gpu_tokens=600_000, max_sequences=2)),
            "decode_slots is offered",
        ),
    ],
)
def test_a_label_that_another_resource_forbids_is_refused(machine: Machine, said: str) -> None:
    with pytest.raises(BenchError, match=said):
        of("agents", 0.95, machine=machine)


def test_a_window_of_too_few_requests_is_refused() -> None:
    """One request between two others: its share of so short a time is anything but the load."""
    with pytest.raises(BenchError, match=r"rounds: load 0.8 cannot be reached with 1 requests"):
        of("rounds", requests=1)


@pytest.mark.parametrize(
    ("workload", "more", "said"),
    [
        ("nothing", {}, "there is no workload nothing: give one of conversation"),
        ("rounds", {"trace": Path("x")}, "rounds is generated and reads no trace"),
        ("unique", {"pause_scale": 2.0}, "unique has no pauses that could be stretched"),
        ("agents", {"trace": Path("none.jsonl")}, r"--trace: none\.jsonl"),
        ("agents", {"load": 0.0}, "load is 0: give one above 0, up to 5"),
        ("agents", {"load": float("nan")}, "load is nan: give one above 0"),
    ],
)
def test_what_cannot_be_made_is_said(workload: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        of(workload, **more)


def test_agents_from_a_file_reach_their_load_and_share_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    shared = list(range(20))
    lines = [
        {"session_id": f"s{number}", "input_length": 512 * len(ids), "output_length": 40}
        | {"hash_ids": ids, "delay": 700.0}
        for number in range(6)
        for ids in (
            [*shared, *range(100 * number + 100, 100 * number + 110 + number)],
            [100 * number + 150, 100 * number + 151],
            [100 * number + 160],
        )
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = of("agents", trace=path)
    reported = in_window(found, ideal(found))
    offered_s = REPLICAS * (found.end_s - found.warm_up_s)
    assert replica_s(reported) / offered_s == pytest.approx(0.8, rel=0.03)
    first = [each.turns[0].spans for each in found.sessions]
    assert {tuple(span.number for span in spans[:20]) for spans in first} == {tuple(shared)}
    own = [span.number for spans in first for span in spans[20:]]
    assert len(own) == len(set(own))


def test_a_conversation_from_a_trace_reaches_its_load_on_every_rotation(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 300 * number, "input_length": 512 * blocks, "output_length": 30}
        | {"hash_ids": [0, *(1000 * (number % 40) + block for block in range(1, blocks))]}
        for number in range(800)
        for blocks in (4 + number // 40,)
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    small = replace(MACHINE, shape=Shape(gpu_tokens=100_000), cpu_tokens=20_000)
    runs = [
        of("conversation", load, trace=path, seed=seed, requests=500, machine=small)
        for seed, load in enumerate(LOADS)
    ]
    for load, found in zip(LOADS, runs, strict=True):
        reported = in_window(found, ideal(found))
        offered_s = REPLICAS * (found.end_s - found.warm_up_s)
        assert replica_s(reported, small) / offered_s == pytest.approx(load, rel=0.03)
        assert all(each.name is None for each in found.sessions)
