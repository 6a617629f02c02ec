"""What is published: every case by name, in sets. Pure.

Sizes, seeds, bounds and grids stand at the top, to be scaled in one place.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.proof.case import BOUNDS, ORACLE, OURS, Case, Disk, Fault, Search, is_peer, is_variant
from bench.ttft import BenchError


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a case is run."""

    requests: int
    seeds: int


SIZES: Final = {
    "headline": Size(requests=5_000, seeds=5),
    "goodput": Size(requests=5_000, seeds=5),
    "regimes": Size(requests=2_000, seeds=3),
    "workloads": Size(requests=2_000, seeds=3),
    "ablations": Size(requests=2_000, seeds=5),
    "faults": Size(requests=2_000, seeds=3),
    "streaming": Size(requests=2_000, seeds=3),
}
"""By set."""
FIRST_SEED: Final = 101
"""Constants are tuned on seeds below it; no published run has one of those."""

TRACED: Final = ("agents", "conversation")
"""The workloads of the headline: a file gives them."""
GENERATED: Final = ("rounds", "unique", "burst", "mixture")
WORKLOADS: Final = (*TRACED, *GENERATED)
TTFT_BOUND_S: Final = {
    "agents": 5.0,
    "conversation": 5.0,
    "rounds": 2.0,
    "unique": 5.0,
    "burst": 5.0,
    "mixture": 5.0,
}
"""Of goodput: a request that waits longer is not served in time."""

LOADS: Final = (0.5, 0.8, 0.95, 1.1)
"""Prefill that one infinite cache for all would leave, over what the fleet prefills."""
HEADLINE_LOADS: Final = (0.8, 0.95)
RAM: Final = (0.2, 1.0, 4.0)
HEADLINE_RAM: Final = (1.0, 4.0)
DISKS: Final[tuple[Disk, ...]] = ("fast", "slow")
FAULTS: Final[tuple[Fault, ...]] = ("slow-replica", "dies-and-returns")
ABLATED: Final = (
    *((workload, 0.8, 1.0) for workload in WORKLOADS),
    *((workload, 0.8, 0.2) for workload in TRACED),
    *((workload, 0.95, 4.0) for workload in TRACED),
)
"""Workload, load and RAM of the ablations: each where its fleet is busy."""
HEADLINE_ONLY: Final = (
    "aibrix-prefix-cache",
    "consistent-hash",
    "round-robin",
    "sticky-least-loaded",
    "vllm-cache-aware",
)
"""Peers that are compared on the headline's cases alone; `check` says whether one is best there."""
LONG_PAUSES: Final = 5.0
"""Agents that pause so many times as long keep a working set of several times all RAM."""


def all_cases(names: Iterable[str]) -> list[Case]:
    """Return every case for the contenders of these names; raise `BenchError` without ours."""
    known = tuple(names)
    if OURS not in known:
        raise BenchError(f"the driver has no contender {OURS!r}, only: {', '.join(known)}")
    peers = tuple(each for each in known if is_peer(each))
    bounds = tuple(each for each in known if each in BOUNDS)
    compared = (OURS, *peers, *bounds)
    leading = (OURS, *(each for each in peers if each not in HEADLINE_ONLY))
    explained = (*leading, *(each for each in bounds if each == ORACLE))
    return [
        *headline(compared),
        *goodput(compared),
        *regimes(explained),
        *workloads(explained),
        *ablations((OURS, *(each for each in known if is_variant(each)))),
        *faults(leading),
        *streaming(leading),
    ]


def headline(contenders: tuple[str, ...]) -> list[Case]:
    """Return the traces where RAM holds at least as much as the GPU."""
    return [
        _case("headline", workload, contenders, load=load, ram=ram)
        for workload in TRACED
        for ram in HEADLINE_RAM
        for load in HEADLINE_LOADS
    ]


def goodput(contenders: tuple[str, ...]) -> list[Case]:
    """Return the searches; without a queue every load is met, and nothing would be found."""
    queueing = tuple(each for each in contenders if each != "no-queue")
    return [
        _case("goodput", workload, queueing, ram=ram, search=Search())
        for workload in TRACED
        for ram in HEADLINE_RAM
    ]


def regimes(contenders: tuple[str, ...]) -> list[Case]:
    """Return all regimes of the traces but those of the headline, where they are larger."""
    known = {each.regime for each in headline(contenders)}
    made = [
        _case("regimes", workload, contenders, load=load, ram=ram, disk=disk)
        for workload in TRACED
        for ram in RAM
        for disk in DISKS
        for load in LOADS
    ]
    made += [
        _case("regimes", "agents", contenders, load=0.8, ram=ram, pause_scale=LONG_PAUSES)
        for ram in RAM
    ]
    return [each for each in made if each.regime not in known]


def workloads(contenders: tuple[str, ...]) -> list[Case]:
    """Return the generated ones; how slow a disk is matters where RAM is little."""
    places: list[tuple[float, Disk]] = [*((ram, "fast") for ram in RAM), (min(RAM), "slow")]
    return [
        _case("workloads", workload, contenders, load=load, ram=ram, disk=disk)
        for workload in GENERATED
        for ram, disk in places
        for load in LOADS
    ]


def ablations(contenders: tuple[str, ...]) -> list[Case]:
    """Return ours and its variants, each without one mechanism, on every workload."""
    return [
        _case("ablations", workload, contenders, load=load, ram=ram)
        for workload, load, ram in ABLATED
    ]


def faults(contenders: tuple[str, ...]) -> list[Case]:
    """Return the traces with a replica in trouble."""
    return [
        _case("faults", workload, contenders, load=0.8, fault=fault)
        for workload in TRACED
        for fault in FAULTS
    ]


def streaming(contenders: tuple[str, ...]) -> list[Case]:
    """Return the mixture as it is, a third of it not streamed, and all of it streamed."""
    return [
        _case("streaming", "mixture", contenders, load=load, all_streamed=streamed)
        for load in HEADLINE_LOADS
        for streamed in (False, True)
    ]


def chosen(cases: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """Return the cases of these sets or names (patterns as in a shell), all where none is given.

    Raises `BenchError` for a word that no case answers to.
    """
    taken: set[str] = set()
    for word in wanted:
        found = {each.name for each in cases if _answers(each, word)}
        if not found:
            raise BenchError(
                f"no set and no case is called {word!r}. The sets are {', '.join(SIZES)}; "
                "for the cases: python -m bench.proof list"
            )
        taken |= found
    return [each for each in cases if not wanted or each.name in taken]


def _answers(case: Case, word: str) -> bool:
    return case.set == word or fnmatch.fnmatchcase(case.name, word)


def _case(
    set_name: str,
    workload: str,
    contenders: tuple[str, ...],
    *,
    load: float | None = None,
    ram: float = 1.0,
    disk: Disk = "fast",
    **more: Any,
) -> Case:
    size = SIZES[set_name]
    parts = [set_name, workload, f"ram{ram:g}", "" if disk == "fast" else disk]
    parts += [f"pauses{more['pause_scale']:g}" if "pause_scale" in more else ""]
    parts += ["" if load is None else f"load{load:g}", more.get("fault") or ""]
    parts += ["streamed" if more.get("all_streamed") else ""]
    return Case(
        name="-".join(filter(None, parts)),
        set=set_name,
        workload=workload,
        load=load,
        ram=ram,
        disk=disk,
        requests=size.requests,
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + size.seeds)),
        contenders=contenders,
        bound_s=TTFT_BOUND_S[workload],
        **more,
    )
