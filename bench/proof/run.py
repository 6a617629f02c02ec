"""One run of a case: a function of the case, a seed and a contender.

`Bench` has what runs need of the workloads and of the driver, as types: tests script their own,
and `bench.proof.wired` has the real ones.
"""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from bench.proof.case import LABEL_TOLERANCE, Case, Fault
from bench.proof.figures import (
    Figures,
    UnreachableError,
    Window,
    bound_key,
    chosen,
    figures,
    find_goodput,
)
from bench.proof.records import Columns, columns
from bench.ttft import BenchError
from bench.workloads.session import Session
from replay.record import Record
from simulator.model.replica_machine import Machine


class OfferedLoad(Protocol):
    """Sessions, and the load that they were measured to be."""

    @property
    def sessions(self) -> Sequence[Session]:
        """With their starts spread over the run."""

    @property
    def warm_up_s(self) -> float:
        """When the fleet is in its steady state."""

    @property
    def end_s(self) -> float:
        """When sessions stop starting."""

    @property
    def reported(self) -> Sequence[int]:
        """Numbers of the requests that are reported: the same ones for every contender."""

    @property
    def working_set_ratio(self) -> float:
        """Tokens in use over what the fleet's GPU and CPU caches hold."""

    @property
    def real_load(self) -> float:
        """Prefill that one infinite cache for all would leave, over what the fleet prefills."""

    @property
    def raw_load(self) -> float:
        """All prompt tokens over the same."""

    @property
    def utilization(self) -> Mapping[str, float]:
        """Offered use by resource."""

    @property
    def binds(self) -> str:
        """The resource that is offered most."""


class Offer(Protocol):
    """Makes a workload at a load; raises `BenchError` where it cannot be reached."""

    def __call__(
        self,
        workload: str,
        *,
        load: float,
        requests: int,
        seed: int,
        replicas: int,
        machine: Machine,
        trace: Path | None,
        pause_scale: float,
    ) -> OfferedLoad:
        """Return it for a fleet."""


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """The fleet of a run, and what befalls it."""

    replicas: int
    machine: Machine
    seed: int
    fault: Fault | None
    window: Window


class Outcome(Protocol):
    """What became of a run."""

    @property
    def records(self) -> Sequence[Record]:
        """Every request, warm-up included."""

    @property
    def counts(self) -> Mapping[str, float]:
        """What else the driver counted."""


class Play(Protocol):
    """Plays sessions to one contender's fleet."""

    def __call__(self, contender: str, sessions: Sequence[Session], plan: FleetPlan) -> Outcome:
        """Return what became of it: the same for the same arguments."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What runs need besides their case."""

    offer: Offer
    play: Play
    traces: Mapping[str, Path]
    """Files by workload."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of a case."""

    case: Case
    seed: int
    contender: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What was offered, as it was measured. The same for every contender."""

    seed: int
    label: float
    """The load that was asked for."""
    real_load: float
    raw_load: float
    binds: str
    utilization: dict[str, float]
    working_set_ratio: float
    """Tokens in use over what the fleet's GPU and CPU caches hold."""
    warm_up_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """One play of one workload; a search for goodput has several."""

    workload: Workload
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a task."""

    contender: str
    seed: int
    plays: tuple[Played, ...]
    columns: Columns | None
    """Workload of the case's first seed, if the case has one load."""
    took_s: float
    """By the clock."""


def run(task: Task, bench: Bench) -> Ran:
    """Run one task; raise `BenchError` that names it for whatever fails in it."""
    began_s = time.perf_counter()
    try:
        if task.case.search is None:
            played, kept = _play(task, bench, task.case.load or 0.0)
            plays: tuple[Played, ...] = (played,)
        else:
            plays, kept = _search(task, bench), None
    except Exception as error:
        raise BenchError(_told(task, error)) from error
    return Ran(
        contender=task.contender,
        seed=task.seed,
        plays=plays,
        columns=kept,
        took_s=time.perf_counter() - began_s,
    )


def _told(task: Task, error: Exception) -> str:
    """Return which run failed and why; of an error that is not foreseen, where."""
    run_name = f"{task.case.name}, {task.contender}, seed {task.seed}"
    if isinstance(error, BenchError | UnreachableError):
        return f"{run_name}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{run_name}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _search(task: Task, bench: Bench) -> tuple[Played, ...]:
    search = task.case.search
    assert search is not None
    plays: list[Played] = []

    def measure(load: float) -> float:
        plays.append(_play(task, bench, load)[0])
        return plays[-1].figures.met[bound_key(task.case.bound_s)]

    find_goodput(measure, search.low, search.high, search.tolerance)
    return tuple(plays)


def _play(task: Task, bench: Bench, load: float) -> tuple[Played, Columns | None]:
    case = task.case
    offered = _offered(task, bench, load)
    window = Window(from_s=offered.warm_up_s, until_s=offered.end_s)
    plan = FleetPlan(
        replicas=case.replicas,
        machine=case.machine,
        seed=task.seed,
        fault=case.fault,
        window=window,
    )
    sessions = all_streamed(offered.sessions) if case.all_streamed else offered.sessions
    outcome = bench.play(task.contender, sessions, plan)
    found = figures(
        outcome.records,
        reported=offered.reported,
        window=window,
        replicas=case.replicas,
        fleet_tokens_per_s=case.fleet_tokens_per_s,
        bounds_s=case.bounds_s,
        both_s=(case.bound_s, case.tpot_bound_s),
        counts=outcome.counts,
    )
    is_first = task.seed == case.seeds[0]
    told = chosen(outcome.records, offered.reported) if is_first else []
    kept = columns(task.contender, task.seed, told) if is_first else None
    return Played(workload=_workload(offered, task.seed, load), figures=found), kept


def _offered(task: Task, bench: Bench, load: float) -> OfferedLoad:
    """Return the workload; raise `UnreachableError` where it is not what it is called."""
    case = task.case
    try:
        made = bench.offer(
            case.workload,
            load=load,
            requests=case.requests,
            seed=task.seed,
            replicas=case.replicas,
            machine=case.machine,
            trace=bench.traces.get(case.workload),
            pause_scale=case.pause_scale,
        )
    except BenchError as error:
        raise UnreachableError(f"load {load:g}: {error}") from error
    if abs(made.real_load / load - 1) > LABEL_TOLERANCE:
        raise UnreachableError(f"load {load:g}: it was measured to be {made.real_load:.3f}")
    return made


def _workload(offered: OfferedLoad, seed: int, label: float) -> Workload:
    return Workload(
        seed=seed,
        label=label,
        real_load=offered.real_load,
        raw_load=offered.raw_load,
        binds=offered.binds,
        utilization=dict(offered.utilization),
        working_set_ratio=offered.working_set_ratio,
        warm_up_s=offered.warm_up_s,
        end_s=offered.end_s,
    )


def all_streamed(sessions: Sequence[Session]) -> list[Session]:
    """Return the sessions with every answer streamed."""
    return [
        replace(each, turns=tuple(replace(turn, streamed=True) for turn in each.turns))
        for each in sessions
    ]
