"""What is replayed: a workload in a regime, and named lists of such cases."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from bench.record import Record
from bench.replay.fleet import CPU_TOKENS, Cpu, Disk, FleetOptions
from bench.ttft import BenchError
from bench.workloads.offered import GENERATED, Offered, offered
from bench.workloads.session import Session, requests
from bench.workloads.trace import read_trace, scaled
from simulator.model.machine import Machine
from simulator.model.rates import Rates, Shape

TRACE_WORKLOAD: Final = "conversation"
WORKLOADS: Final = tuple(GENERATED)
REPORTED_REQUESTS: Final = 2_000
"""How many are reported where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one case sends."""

    sessions: Sequence[Session]
    offered: Offered | None = None
    """None: a trace as it is, of which every request is reported."""

    def measured(self, records: Sequence[Record]) -> list[Record]:
        """Return the records of the requests that are reported."""
        return list(records) if self.offered is None else self.offered.measured(records)

    def summary(self) -> dict[str, Any] | None:
        """Return what was measured of it, ready for JSON."""
        if self.offered is None:
            return None
        left_out = ("sessions", "reported")
        names = (each.name for each in fields(self.offered) if each.name not in left_out)
        return {name: getattr(self.offered, name) for name in names}

    @property
    def requests(self) -> int:
        """Requests that are reported."""
        return requests(self.sessions) if self.offered is None else len(self.offered.reported)

    @property
    def not_reported(self) -> int:
        """Requests that are sent before them or after them."""
        return requests(self.sessions) - self.requests


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload in one regime."""

    workload: str
    cpu: Cpu = "scarce"
    disk: Disk = "fast"
    load: float = 0.8
    """Prefill that an infinite cache leaves, as a share of what the fleet prefills."""
    time_scale: float | None = None
    """Instead of a load: the factor on the trace's times."""
    requests: int | None = None
    """So many are reported; None: `REPORTED_REQUESTS`, or all of a trace with a time scale."""

    @property
    def title(self) -> str:
        """A name for people and files."""
        pace = f"load {self.load:g}"
        if self.time_scale is not None:
            pace = f"time x {self.time_scale:g}"
        return f"{self.workload}, {self.cpu} cpu, {self.disk} disk, {pace}"

    def work(self, options: FleetOptions, trace: Path | None) -> Work:
        """Return the workload for a fleet; raise `BenchError` where it cannot be made."""
        if self.time_scale is not None:
            return Work(sessions=scaled(self._read(trace), self.time_scale))
        found = offered(
            self.workload,
            load=self.load,
            requests=self.requests or REPORTED_REQUESTS,
            seed=options.seed,
            replicas=options.replicas,
            machine=machine_of(options),
            trace=trace,
        )
        return Work(sessions=found.sessions, offered=found)

    def _read(self, trace: Path | None) -> list[Session]:
        if trace is None or self.workload != TRACE_WORKLOAD:
            raise BenchError(
                f"--time-scale is for {TRACE_WORKLOAD} with --trace FILE: give --load instead"
            )
        return read_trace(trace, limit=self.requests)


def machine_of(options: FleetOptions) -> Machine:
    """Return the replicas of a fleet as they are modelled."""
    return Machine(
        shape=Shape(
            gpu_tokens=options.gpu_tokens,
            block_tokens=options.block_tokens,
            chunk_tokens=options.chunk_tokens,
        ),
        rates=Rates(
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            load_tokens_per_s=options.load_tokens_per_s,
            disk_tokens_per_s=options.disk_tokens_per_s,
            peer_tokens_per_s=options.peer_tokens_per_s,
        ),
        cpu_tokens=CPU_TOKENS[options.cpu],
        disk_tokens=options.disk_tokens,
    )


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
