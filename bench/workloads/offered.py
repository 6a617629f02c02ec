"""What a workload offers a fleet at a load, and which of the fleet's resources that takes most."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.ttft import BenchError
from bench.workloads.generated import agents, burst, chats, mixture, rounds, unique
from bench.workloads.pacing import Pacer, Window
from bench.workloads.resources import DECODE_SLOTS, KV_MEMORY, Usage, measure
from bench.workloads.session import Session, stretched
from bench.workloads.trace import drawn_agents, read_agents, read_trace, rotated
from replay.record import Record
from simulator.model.replica_machine import Machine

GENERATED: Final[Mapping[str, Callable[[int], Iterator[Session]]]] = {
    "conversation": chats,
    "agents": agents,
    "rounds": rounds,
    "unique": unique,
    "burst": burst,
    "mixture": mixture,
}
"""All workloads; without a trace each is generated."""
TRACED: Final = ("conversation", "agents")
"""Workloads that can be read from a trace."""
_MOST_LOAD: Final = 5.0
PAUSING: Final = ("agents", "rounds", "mixture")
"""Workloads whose sessions have pauses."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Sessions for one fleet, and what was measured of them in the ideal run.

    There each request is answered at once and finds all that was sent before
    (`bench.workloads.ideal`). A real fleet answers later, so that the later
    turns of its sessions are due later, and come the slower the longer it takes.
    """

    sessions: Sequence[Session]
    """In order of their starts."""
    warm_up_s: float
    """Requests due before this are not reported."""
    end_s: float
    """Sessions stop starting here; requests due later are not reported."""
    reported: Sequence[int]
    """Numbers of the requests that the ideal run has due between the two.

    A request's number counts the turns of all sessions in order. Contenders
    are compared on these: the same ones, whenever a fleet had them due.
    """
    real_load: float
    """Prefill that an infinite cache leaves, over what the fleet can prefill next to its decodes.

    In the window, as the share of the replicas' time that both take; see
    `bench.workloads.pacing`.
    """
    raw_load: float
    """Prefill with nothing cached, over the replicas' time."""
    utilization: Mapping[str, float]
    """Of prefill, KV memory, decode slots and disk: what is offered, over what the fleet has.

    KV memory and decode slots are those of requests that are never delayed: a
    step is as long as the sequences that decode on average make it.
    """
    binds: str
    """The resource with the highest utilization."""
    crowded: Mapping[str, float]
    """The same where prefill and decodes share the replicas' steps, as they do in a batch.

    A step that decodes then takes 1/(1 - prefill) as long, at most what a full one
    does; KV memory and decode slots are held the longer. Instead of prefill it
    has ``replica_time``, the real load. What is above 1 here binds before the
    replicas' time does, whatever the router decides.
    """
    working_set_tokens: int
    """Distinct tokens used within `working_set_s`."""
    working_set_s: float
    """The mean length of a session; where requests stand alone, the mean time to the next use."""
    cache_tokens: int
    """What the fleet's GPU and CPU caches hold together."""

    @property
    def crowded_binds(self) -> str:
        """The resource that is short first in a batch."""
        return max(self.crowded, key=self.crowded.__getitem__)

    @property
    def working_set_ratio(self) -> float:
        """The working set over the fleet's GPU and CPU caches."""
        return self.working_set_tokens / self.cache_tokens

    def measured(self, records: Sequence[Record]) -> list[Record]:
        """Return the records of the requests that are reported."""
        wanted = frozenset(self.reported)
        return [each for each in records if each.number in wanted]


def offered(
    workload: str,
    *,
    load: float,
    requests: int,
    seed: int,
    replicas: int,
    machine: Machine,
    trace: Path | None = None,
    pause_scale: float = 1.0,
) -> Offered:
    """Return sessions that offer a fleet of equal machines a load, ``requests`` of them reported.

    ``trace`` is a conversation's or the agents' file; without one both are
    generated. ``pause_scale`` stretches the pauses inside sessions: more of
    them are alive at the same load, and the working set grows.

    Raises `BenchError` where the label cannot be reached: the measured load is
    off by more than 3%, or running requests would need more KV memory or decode
    slots than there are. A disk may be offered more than it reads: what it does
    not deliver is computed anew.
    """
    _check(workload, load=load, trace=trace, pause_scale=pause_scale)
    endless = (stretched(each, pause_scale) for each in _endless(workload, seed, trace))
    pacer = Pacer(endless, requests=requests, replicas=replicas, machine=machine)
    try:
        window = pacer.paced(load)
    except BenchError as error:
        raise BenchError(f"{workload}: {error}") from None
    usage = measure(window, replicas=replicas, machine=machine)
    found = _offered(window, usage, replicas=replicas, machine=machine)
    _check_reached(found, f"{workload} at load {load:g}", machine)
    return found


def _check(workload: str, *, load: float, trace: Path | None, pause_scale: float) -> None:
    if workload not in GENERATED:
        raise BenchError(f"there is no workload {workload}: give one of {', '.join(GENERATED)}")
    if trace is not None and workload not in TRACED:
        raise BenchError(
            f"{workload} is generated and reads no trace: give one for {' or '.join(TRACED)}"
        )
    if not 0 < load <= _MOST_LOAD:
        raise BenchError(f"load is {load:g}: give one above 0, up to {_MOST_LOAD:g}")
    if pause_scale != 1.0 and workload not in PAUSING:
        raise BenchError(
            f"{workload} has no pauses that could be stretched: stretch {', '.join(PAUSING)}"
        )


def _endless(workload: str, seed: int, trace: Path | None) -> Iterator[Session]:
    """Return a workload's sessions, starting in mean gaps between them."""
    if trace is None:
        return GENERATED[workload](seed)
    if workload == "agents":
        return drawn_agents(read_agents(trace), seed)
    return rotated(read_trace(trace), seed)


def _offered(window: Window, usage: Usage, *, replicas: int, machine: Machine) -> Offered:
    rates = machine.rates
    raw_s = sum(rates.prefill_s(window.turn(due).prompt_tokens) for due in window.reported)
    return Offered(
        sessions=window.sessions(),
        warm_up_s=window.begin_s,
        end_s=window.end_s,
        reported=window.numbers(),
        real_load=window.load,
        raw_load=raw_s / replicas / window.length_s,
        utilization=usage.offered,
        binds=max(usage.offered, key=usage.offered.__getitem__),
        crowded=usage.crowded,
        working_set_tokens=usage.working_set_tokens,
        working_set_s=usage.working_set_s,
        cache_tokens=replicas * (machine.shape.gpu_tokens + machine.cpu_tokens),
    )


def _check_reached(found: Offered, what: str, machine: Machine) -> None:
    tokens = max(session.longest_tokens for session in found.sessions)
    if tokens > machine.shape.gpu_tokens:
        raise BenchError(
            f"{what}: a prompt and its answer have {tokens} tokens, and a GPU cache holds "
            f"{machine.shape.gpu_tokens}; give it more"
        )
    for resource in (KV_MEMORY, DECODE_SLOTS):
        if found.utilization[resource] > 1:
            raise BenchError(
                f"{what} is not bound by the replicas' time: {resource} is offered "
                f"{found.utilization[resource]:.2f} of what the fleet has; give the machines "
                "more of it, or a lower load"
            )
