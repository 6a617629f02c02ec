"""What is replayed: a workload in a regime, and named lists of such cases."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.replay.fleet import Cpu, Disk, FleetOptions
from bench.ttft import BenchError
from bench.workloads.generated import GENERATORS
from bench.workloads.session import Session
from bench.workloads.trace import at_load, read_trace, scaled

TRACE_WORKLOAD: Final = "conversation"
WORKLOADS: Final = (TRACE_WORKLOAD, *GENERATORS)
GENERATED_REQUESTS: Final = 2_000
"""How many a generator makes where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload in one regime."""

    workload: str
    cpu: Cpu = "scarce"
    disk: Disk = "fast"
    load: float = 0.8
    """Prompt tokens that come, as a share of what the fleet prefills: none counted as cached."""
    time_scale: float | None = None
    """Instead of a load: the factor on the trace's times."""
    requests: int | None = None
    """The first so many; None: all of a trace, `GENERATED_REQUESTS` of a generator."""

    @property
    def title(self) -> str:
        """A name for people and files."""
        pace = f"load {self.load:g}"
        if self.time_scale is not None:
            pace = f"time x {self.time_scale:g}"
        return f"{self.workload}, {self.cpu} cpu, {self.disk} disk, {pace}"

    def sessions(self, options: FleetOptions, trace: Path | None) -> list[Session]:
        """Return the workload for a fleet; raise `BenchError` where it cannot be made."""
        tokens_per_s = self.load * options.fleet_tokens_per_s
        if self.workload != TRACE_WORKLOAD:
            if self.time_scale is not None:
                raise BenchError(
                    "--time-scale is for a trace: give --load for a generated workload"
                )
            make = GENERATORS[self.workload]
            return make(
                self.requests or GENERATED_REQUESTS, seed=options.seed, tokens_per_s=tokens_per_s
            )
        if trace is None:
            raise BenchError(
                f"{TRACE_WORKLOAD} needs --trace FILE; without one: {', '.join(GENERATORS)}"
            )
        read = read_trace(trace, limit=self.requests)
        if self.time_scale is not None:
            return scaled(read, self.time_scale)
        return at_load(read, tokens_per_s=tokens_per_s)


def _cases(
    workloads: Sequence[str], loads: Sequence[float], requests: int, *, regimes: bool
) -> tuple[Case, ...]:
    places: tuple[tuple[Cpu, Disk], ...] = (("scarce", "fast"),)
    if regimes:
        places = (*places, ("scarce", "slow"), ("ample", "fast"))
    return tuple(
        Case(workload=workload, cpu=cpu, disk=disk, load=load, requests=requests)
        for workload in workloads
        for cpu, disk in places
        for load in loads
    )


MATRICES: Final[dict[str, tuple[Case, ...]]] = {
    # Every workload once, where RAM is scarce.
    "workloads": _cases(WORKLOADS, (0.8,), 600, regimes=False),
    # The trace in every regime.
    "regimes": _cases((TRACE_WORKLOAD,), (0.5, 0.8, 1.0), 1_500, regimes=True),
    # Both, and the other workloads in the regimes too.
    "full": _cases(WORKLOADS, (0.5, 0.8, 1.0), 1_500, regimes=True),
}


def matrix(name: str, *, workload: str | None = None, requests: int | None = None) -> list[Case]:
    """Return the cases of a matrix: of one workload, or with so many requests, if it is given.

    Raises `BenchError` where the matrix does not have that workload.
    """
    cases = [each for each in MATRICES[name] if workload in (None, each.workload)]
    if not cases:
        raise BenchError(f"--matrix {name} has no {workload}: give --matrix full")
    return [replace(each, requests=requests or each.requests) for each in cases]
