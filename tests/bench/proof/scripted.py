"""Workloads and a driver that are made up, so that the proof's own work can be tested exactly.

Both are plain functions of their arguments, and can be called in a pool's processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.proof.case import Case, is_peer
from bench.proof.cases import LEADING
from bench.proof.make import NothingFinished, run_case
from bench.proof.results import Definition, Result, result
from bench.proof.run import Bench, FleetPlan
from bench.ttft import BenchError
from bench.workloads.session import Session, Span, Turn
from replay.record import Record
from simulator.model.replica_machine import Machine

MOST_LOAD = 1.25
"""The scripted workload cannot be offered at more."""
BEST = "vllm-kv-aware-sessions"
NEXT = "vllm-cache-aware-tuned"
"""The peers that lead on agents; the first is the better one."""
LEFT_OUT = "round-robin"
"""A peer that only the set of all peers has."""
TTFT_S: Mapping[str, float] = {
    "ours": 1.0,
    "ours-without-prefetch": 1.5,
    "ours-without-copies": 0.98,
    "ours-without-rhythm": 0.8,
    "ours-with-growth": 0.8,
    "ours-true-rates": 0.8,
    NEXT: 3.0,
    BEST: 2.5,
    "llm-d-affinity": 3.0,
    "vllm-kv-aware": 2.5,
    LEFT_OUT: 2.6,
    "shared-infinite-cache": 0.8,
    "no-queue": 0.3,
}
"""TTFT of the first request at a load of 1, by contender."""
AWAY = 1.5
"""Times that a peer takes on a workload where it is not among the leading ones."""
NAMES = tuple(TTFT_S)


@dataclass(frozen=True, kw_only=True)
class ScriptedLoad:
    sessions: Sequence[Session]
    reported: Sequence[int]
    real_load: float
    raw_load: float = 3.0
    warm_up_s: float = 10.0
    end_s: float = 110.0
    working_set_ratio: float = 1.5
    utilization: Mapping[str, float] = field(default_factory=lambda: {"prefill": 0.8})
    binds: str = "prefill"


@dataclass(frozen=True, kw_only=True)
class ScriptedRun:
    records: Sequence[Record]
    counts: Mapping[str, float]


def offer(
    workload: str,
    *,
    load: float,
    requests: int,
    seed: int,
    replicas: int,
    machine: Machine,
    trace: Path | None,
    pause_scale: float,
) -> ScriptedLoad:
    """Sessions of two turns; the load is in their starts, for `play` to find."""
    if load > MOST_LOAD:
        raise BenchError(f"{workload} cannot be offered at {load:g}")
    turns = (Turn((Span(1, 100),), 11, streamed=False), Turn((Span(2, 50),), 11, 1.0))
    sessions = [
        Session(10.0 + number * 100 / requests, turns, f"s{number}")
        for number in range(requests // 2)
    ]
    return ScriptedLoad(
        sessions=[replace(each, name=f"{workload} {load}") for each in sessions],
        reported=range(requests),
        real_load=load * (1.01 + seed / 100_000),
    )


def play(contender: str, sessions: Sequence[Session], plan: FleetPlan) -> ScriptedRun:
    """Answer later at higher loads, on some seeds, and the later the request."""
    workload, load = (sessions[0].name or "agents 1").split()
    away = is_peer(contender) and contender not in LEADING[workload]
    first_s = TTFT_S[contender] * float(load) * (AWAY if away else 1)
    records = [
        record(
            2 * at + turn,
            turn=turn,
            session=f"s{at}",
            due_s=session.start_s + turn,
            ttft_s=first_s * (1 + plan.seed % 10 / 50) * (1 + at / len(sessions)),
            streamed=session.turns[turn].streamed,
            instance_id=f"r{(at + turn * (contender != 'ours')) % plan.replicas}",
            headers={"reason": "longest-match"} if contender == "ours" else {},
        )
        for at, session in enumerate(sessions)
        for turn in range(2)
    ]
    return ScriptedRun(records=records, counts={"prefetch_unused_tokens": 5_000.0})


def record(number: int, *, ttft_s: float | None = 1.0, **more: Any) -> Record:
    known: dict[str, Any] = {
        "session": None,
        "turn": 0,
        "prompt_tokens": 1_000,
        "due_s": 20.0,
        "total_s": None if ttft_s is None else ttft_s + 1.0,
        "output_tokens": 11,
        "status": 200,
        "instance_id": "a",
        "cached_tokens": {"gpu": 200, "cpu": 100, "disk": 0},
    }
    return Record(number=number, ttft_s=ttft_s, **(known | more))


def failed(number: int, status: int | None = 503, **more: Any) -> Record:
    known: dict[str, Any] = {"error": f"{status}: no", "cached_tokens": {}}
    return record(number, ttft_s=None, status=status, **(known | more))


def case(**more: Any) -> Case:
    known: dict[str, Any] = {
        "name": "headline-agents-ram1-load0.8",
        "set": "headline",
        "workload": "agents",
        "load": 0.8,
        "ram": 1.0,
        "requests": 20,
        "seeds": (101, 102, 103),
        "contenders": ("ours", NEXT, BEST, "shared-infinite-cache", "no-queue"),
        "bound_s": 2.0,
    }
    return Case(**(known | more))


def scripted_bench() -> Bench:
    return Bench(offer=offer, play=play, traces={})


def made(one: Case, *, commit: str = "0123456789ab") -> Result:
    """Return a case's result, as the scripted driver gives it."""
    rans = run_case(one, scripted_bench(), jobs=1, finished=NothingFinished(), tell=lambda *_: None)
    definition = Definition(case=one, sources="none", traces={})
    return result(definition, rans, machine={"commit": commit, "cpu": "2 x cpu"}, records=b"")
