"""Runs of a case, by a driver that is made up."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bench.proof.case import Case, Search
from bench.proof.compare import goodputs
from bench.proof.make import NothingFinished, run_case, tasks
from bench.proof.run import FleetPlan, Ran, Task, run
from bench.ttft import BenchError
from bench.workloads.session import Session
from tests.bench.proof import scripted
from tests.bench.proof.scripted import BEST, NEXT, case, made, offer, play, scripted_bench


def ran(one: Case, contender: str = "ours", seed: int = 101, **more: Any) -> Ran:
    return run(Task(case=one, seed=seed, contender=contender), replace(scripted_bench(), **more))


def same(runs: Sequence[Ran]) -> list[Ran]:
    """Return runs without how long they took."""
    return [replace(each, took_s=0.0) for each in runs]


def run_all(one: Case, jobs: int) -> list[Ran]:
    return run_case(
        one, scripted_bench(), jobs=jobs, finished=NothingFinished(), tell=lambda *_: None
    )


def test_a_run_tells_what_was_offered_and_what_became_of_it() -> None:
    (played,) = ran(case()).plays
    assert played.workload.label == 0.8
    assert played.workload.real_load == pytest.approx(0.8 * 1.01101)
    assert (played.figures.requests, played.figures.errors) == (20, 0)
    assert played.figures.ttft_p50_s == pytest.approx(0.8 * 1.02 * 1.4)
    assert played.figures.counts == {"prefetch_unused_tokens": 5_000.0}
    assert set(played.figures.met) == {"1", "2", "5", "10", "20"}


def test_records_are_kept_of_the_first_seed_alone() -> None:
    kept = ran(case()).columns
    assert kept is not None
    assert kept.number == list(range(20))
    assert ran(case(), seed=102).columns is None


def test_a_pool_gives_what_one_process_gives() -> None:
    one = case(seeds=(101, 102))
    assert same(run_all(one, jobs=2)) == same(run_all(one, jobs=1))
    assert [(each.seed, each.contender) for each in run_all(one, jobs=1)] == [
        (each.seed, each.contender) for each in tasks(one)
    ]


def test_what_has_run_is_not_run_again() -> None:
    finished = Remembered()
    told: list[tuple[int, int]] = []
    one = case(seeds=(101,), contenders=("ours", NEXT, BEST))
    finished.runs["ours"] = ran(one)
    found = run_case(
        one,
        scripted_bench(),
        jobs=1,
        finished=finished,
        tell=lambda done, all_, _: told.append((done, all_)),
    )
    assert found[0] is finished.runs["ours"]
    assert told == [(2, 3), (3, 3)]
    assert set(finished.runs) == {"ours", NEXT, BEST}


@dataclass
class Remembered:
    runs: dict[str, Ran] = field(default_factory=dict)

    def get(self, task: Task) -> Ran | None:
        return self.runs.get(task.contender)

    def put(self, task: Task, ran: Ran) -> None:
        self.runs[task.contender] = ran


def test_a_goodput_is_searched_for_at_measured_loads() -> None:
    one = case(load=None, search=Search(), bound_s=2.0)
    found = ran(one)
    assert found.columns is None
    loads = [each.workload.label for each in found.plays]
    assert loads[:2] == [pytest.approx(0.8), pytest.approx(1.1)]
    result = made(replace(one, seeds=(101,), contenders=("ours",)))
    assert [each.label for each in result.runs] == loads
    assert all(each.real_load > each.label for each in result.workloads)


def test_a_search_stops_where_the_workload_ends() -> None:
    found = ran(case(load=None, search=Search(high=3.0), bound_s=100.0))
    loads = [each.workload.label for each in found.plays]
    assert scripted.MOST_LOAD - 0.1 < max(loads) <= scripted.MOST_LOAD
    one = case(load=None, search=Search(high=3.0), bound_s=100.0, seeds=(101,))
    assert {each.beyond for each in goodputs(made(one), "ours")} == {"above"}


def test_a_failing_run_is_named() -> None:
    with pytest.raises(BenchError, match=r"headline-agents.*, ours, seed 101: load 1.5: agents"):
        ran(case(load=1.5))
    with pytest.raises(BenchError, match=r"ours, seed 101: ZeroDivisionError: .* \(.*:\d+\)"):
        ran(case(), play=broken)
    with pytest.raises(BenchError, match=r"seed \d+: ZeroDivisionError"):
        run_case(
            case(),
            replace(scripted_bench(), play=broken),
            jobs=2,
            finished=NothingFinished(),
            tell=lambda *_: None,
        )


def broken(contender: str, sessions: Sequence[Session], plan: FleetPlan) -> scripted.ScriptedRun:
    raise ZeroDivisionError(1 // len(sessions[:0]))


def test_a_load_that_is_not_what_it_is_called_is_refused() -> None:
    with pytest.raises(BenchError, match=r"load 0.8: it was measured to be 0.9"):
        ran(case(), offer=mislabelled)


def mislabelled(workload: str, **more: Any) -> scripted.ScriptedLoad:
    return replace(offer(workload, **more), real_load=0.9)


def test_all_streamed_streams_every_answer() -> None:
    assert seen_streams(case()) == {False, True}
    assert seen_streams(case(all_streamed=True)) == {True}


def seen_streams(one: Case) -> set[bool]:
    seen: set[bool] = set()

    def watching(
        contender: str, sessions: Sequence[Session], plan: FleetPlan
    ) -> scripted.ScriptedRun:
        seen.update(turn.streamed for each in sessions for turn in each.turns)
        return play(contender, sessions, plan)

    ran(one, play=watching)
    return seen


def test_the_fleet_is_the_case_s() -> None:
    plans: list[FleetPlan] = []

    def watching(
        contender: str, sessions: Sequence[Session], plan: FleetPlan
    ) -> scripted.ScriptedRun:
        plans.append(plan)
        return play(contender, sessions, plan)

    ran(case(ram=4.0, disk="slow", fault="slow-replica"), play=watching, seed=102)
    (plan,) = plans
    assert (plan.replicas, plan.seed, plan.fault) == (8, 102, "slow-replica")
    assert plan.machine.cpu_tokens == 4 * plan.machine.shape.gpu_tokens
    assert (plan.window.from_s, plan.window.until_s) == (10.0, 110.0)
