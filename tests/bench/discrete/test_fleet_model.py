"""The model that drives the router's policy code without sockets."""

import random
from itertools import count

import pytest

from bench.discrete.fleet_model import FleetModel, Machine, ModelPrompt
from bench.discrete.scale import fill_sessions, measure
from router.config import AdmissionConfig
from router.policy import Reason

QUIET = AdmissionConfig(enabled=False)


def conversations(
    sessions: int, turns: int, chooser: random.Random
) -> list[tuple[float, ModelPrompt]]:
    """Return turns that each go on from the one before, some seconds later."""
    numbers = count(1)
    arrivals = []
    for session in range(sessions):
        blocks: list[int] = [0]
        at_s = chooser.uniform(0.0, 60.0)
        for _ in range(turns):
            blocks = [*blocks, *(next(numbers) for _ in range(chooser.randrange(2, 12)))]
            prompt = ModelPrompt(blocks, len(blocks) * 512, session=f"s{session}")
            arrivals.append((at_s, prompt))
            at_s += chooser.uniform(20.0, 40.0)
    return arrivals


def test_one_request_takes_as_long_as_its_parts() -> None:
    model = FleetModel(1, Machine(), admission=QUIET)
    (first,) = model.run([(0.0, ModelPrompt([1, 2, 3, 4], 2048))])
    assert first.ttft_s == pytest.approx(2048 / 8000)
    again = model.run([(10.0, ModelPrompt([1, 2, 3, 4, 5], 2560))])[-1]
    assert again.cached_tokens == 2048
    assert again.ttft_s == pytest.approx(512 / 8000)


def test_what_left_the_gpu_comes_from_disk() -> None:
    machine = Machine(gpu_tokens=2048, cpu_tokens=1024)
    model = FleetModel(1, machine, admission=QUIET)
    model.run([(0.0, ModelPrompt([1, 2, 3, 4], 2048)), (5.0, ModelPrompt([5, 6, 7, 8], 2048))])
    again = model.run([(10.0, ModelPrompt([1, 2, 3, 4, 9], 2560))])[-1]
    expected_s = 2048 / 20_000 + 2048 / 160_000 + 512 / 8000
    assert again.ttft_s == pytest.approx(expected_s)


def test_the_same_policy_code_runs_a_thousand_replicas() -> None:
    """Turns find their prefix, nothing leaks, and the router's tables hold together."""
    chooser = random.Random(3)
    model = FleetModel(1000, Machine(), max_sessions=1_000_000)
    fill_sessions(model.fleet, 1_000_000, 1000)
    assert len(model.fleet.sessions) == 1_000_000
    arrivals = conversations(300, 4, chooser)
    answers = model.run(arrivals)
    assert len(answers) == len(arrivals)
    assert model.refused == 0
    known = sum(len(p.blocks) * 512 for _, p in arrivals) - sum(a.cached_tokens for a in answers)
    fresh = 512 * len({block for _, prompt in arrivals for block in prompt.blocks})
    # What is new must be computed once; the system prompt (a block) once a replica used.
    assert known <= fresh + 512 * 300 + 512 * len(arrivals)
    assert all(each.in_flight == 0 for each in model.fleet.replicas.values())
    model.fleet.index.check()
    model.fleet.sessions.check()
    assert len(model.fleet.sessions) <= 1_000_000


def test_a_burst_is_computed_once_a_replica_and_stampedes_nobody() -> None:
    """100 equal prompts at once: some replicas compute them, each once, and share the rest."""
    model = FleetModel(8, Machine())
    prompt = [*range(1, 17)]
    answers = model.run([(0.0, ModelPrompt(prompt, 8192)) for _ in range(100)])
    computed = [each for each in answers if each.cached_tokens < 4096]
    assert len(answers) == 100
    assert len(computed) <= 8
    assert max(each.ttft_s for each in answers) < 8192 / 8000 + 100 * 0.15


def test_a_burst_opens_all_replicas_while_it_is_still_read() -> None:
    """Each of 40 equal prompts comes 2 ms after the one before, as a router reads them."""
    model = FleetModel(8, Machine(block_tokens=64))
    prompt = [*range(1, 126)]
    answers = model.run([(0.002 * at, ModelPrompt(prompt, 8063)) for at in range(40)])
    assert sum(each.cached_tokens == 0 for each in answers) == 8


def test_late_binding_serves_the_short_ones_first() -> None:
    model = FleetModel(1, Machine(), admission=AdmissionConfig(dispatch_ahead_s=0.1))
    warm = [(0.0, ModelPrompt([1], 512))]
    long = [(10.0, ModelPrompt([*range(at, at + 100)], 51_200)) for at in (100, 300)]
    short = [(10.1 + at, ModelPrompt([1000 + at], 512)) for at in range(5)]
    answers = model.run([*warm, *long, *short])
    by_length = [each.prompt_tokens for each in answers[1:]]
    assert by_length == [51_200, 512, 512, 512, 512, 512, 51_200]


def test_the_scale_bench_measures_and_reports() -> None:
    row = measure(20, sessions=100, index_keys=5_000, decisions=8)
    assert row.replicas == 20
    assert row.index_keys >= 5_000
    assert row.sessions == 100
    assert 0 < row.place_p50_us <= row.place_p99_us


def test_reasons_are_those_of_the_router() -> None:
    model = FleetModel(2, Machine(), admission=QUIET)
    decision = model.fleet.place(ModelPrompt([1], 512), model=None, session=None, now_s=0.0)
    assert decision.reason is Reason.NO_INFORMATION
