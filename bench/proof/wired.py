"""The real workloads and the driver of discrete events, as `bench.proof.run` wants them."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from bench.discrete.contenders import NAMES, play
from bench.discrete.play import FleetOptions, Run
from bench.proof.run import Bench, FleetPlan
from bench.workloads.offered import Offered, offered
from bench.workloads.session import Session
from replay.replica import Fault

SLOWDOWN: Final = 2.0
"""Factor by which the slow replica is slower."""
DIES_AT: Final = 0.25
"""Where in the reported window a replica dies, and where it returns."""
RETURNS_AT: Final = 0.5


def bench(traces: Mapping[str, Path]) -> Bench:
    """Return what runs need, with these traces by workload."""
    return Bench(offer=offer, play=play_plan, traces=traces)


@lru_cache(maxsize=4)
def offer(workload: str, **arguments: Any) -> Offered:
    """Return what `offered` does; a seed's contenders follow each other, so it is kept."""
    return offered(workload, **arguments)


def contenders() -> tuple[str, ...]:
    """Return the names of all contenders."""
    return NAMES


def play_plan(contender: str, sessions: Sequence[Session], plan: FleetPlan) -> Run:
    """Play sessions to a contender's fleet; called in the pool's processes."""
    options = FleetOptions(
        replicas=plan.replicas, machine=plan.machine, seed=plan.seed, faults=faults(plan)
    )
    return play(contender, sessions, options)


def faults(plan: FleetPlan) -> list[Fault]:
    """Return what befalls the fleet's first replica."""
    if plan.fault is None:
        return []
    if plan.fault == "slow-replica":
        return [Fault(slot=0, slowdown=SLOWDOWN)]
    window = plan.window
    return [
        Fault(
            slot=0,
            dies_s=window.from_s + DIES_AT * window.length_s,
            returns_s=window.from_s + RETURNS_AT * window.length_s,
        )
    ]
