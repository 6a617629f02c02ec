"""What runs need of the workloads and of the driver, as types: tests script their own.

`bench.proof.wired` has the real ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.proof.case import Fault
from bench.proof.figures import Window
from bench.record import Record
from bench.workloads.session import Session
from simulator.model.machine_and_request import Machine


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
        """What the driver counted beside them."""


class Play(Protocol):
    """Plays sessions to one contender's fleet."""

    def __call__(self, contender: str, sessions: Sequence[Session], plan: FleetPlan) -> Outcome:
        """Return what became of it: the same for the same arguments."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What runs need beside their case."""

    offer: Offer
    play: Play
    traces: Mapping[str, Path]
    """Files by workload."""
