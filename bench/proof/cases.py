"""What is published: every case by name, in sets. Pure.

Sizes, seeds, bounds and grids stand at the top, to be scaled in one place.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bench.proof.case import (
    ANSWERS,
    BOUNDS,
    OURS,
    Case,
    Disk,
    Fault,
    Search,
    is_peer,
    is_split,
    is_variant,
)
from bench.ttft import BenchError


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a case is run."""

    requests: int
    seeds: int


class Place(NamedTuple):
    """Where a workload is played."""

    workload: str
    ram: float
    load: float
    pause_scale: float = 1.0


SIZES: Final = {
    "headline": Size(requests=1_000, seeds=3),
    "regimes": Size(requests=400, seeds=3),
    "ablations": Size(requests=500, seeds=3),
    "goodput": Size(requests=800, seeds=4),
    "streaming": Size(requests=1_000, seeds=3),
    "faults": Size(requests=800, seeds=2),
    "peers": Size(requests=300, seeds=2),
    "answers": Size(requests=250, seeds=1),
}
"""By set, the most important first. A run's warm-up takes as long as several hundred requests."""
FIRST_SEED: Final = 801
"""Constants are tuned on seeds below it; no published run has one of those."""

TRACED: Final = ("agents", "conversation")
"""The workloads that a file gives."""
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
TPOT_BOUND_S: Final = {"agents": 0.03}
"""Longest time per output token of a request that meets both bounds, if not a case's default."""

LOADS: Final = (0.5, 0.8, 0.95)
"""Prefill that one infinite cache for all would leave, over what the fleet prefills."""
RAM: Final = (0.2, 1.0, 4.0)
HEADLINE_RAM: Final = (1.0, 4.0)
"""RAM of the traces in the headline."""
LONG_PAUSES: Final = 5.0
"""Agents with pauses longer by this factor keep a working set of several times all RAM."""
HEADLINE: Final = (
    *(Place(name, ram, load) for name in TRACED for ram in HEADLINE_RAM for load in LOADS[1:]),
    Place("agents", 1.0, 0.8, LONG_PAUSES),
    Place("rounds", 0.2, 0.8),
    Place("rounds", 1.0, 0.8),
    Place("rounds", 1.0, 0.95),
    Place("burst", 1.0, 0.8),
    Place("mixture", 1.0, 0.8),
)
ONE_RAM: Final = ("unique", "burst")
"""Workloads that find nothing outside of the GPU's cache: RAM changes nothing in them."""
EVERYWHERE: Final = tuple(
    Place(workload, ram, load)
    for workload in WORKLOADS
    for ram in ((1.0,) if workload in ONE_RAM else RAM)
    for load in LOADS
)
"""Where ours must be behind no peer: what is not in the headline is in the regimes."""
FAULTS: Final[tuple[Fault, ...]] = ("slow-replica", "dies-and-returns")
ABLATED: Final = (
    ("agents", 0.8, 1.0),
    ("agents", 0.95, 1.0),
    ("conversation", 0.95, 1.0),
    ("rounds", 0.8, 0.2),
    ("mixture", 0.95, 1.0),
    ("burst", 0.8, 1.0),
)
"""Workload, load and RAM of the ablations: each where its fleet is busy."""
WITH_SESSIONS: Final = ("vllm-kv-aware-sessions", "vllm-cache-aware-tuned")
WITHOUT_SESSIONS: Final = ("vllm-kv-aware", "llm-d-affinity")
LEADING: Final = {
    "agents": WITH_SESSIONS,
    "conversation": WITHOUT_SESSIONS,
    "rounds": WITH_SESSIONS,
    "unique": WITHOUT_SESSIONS,
    "burst": WITHOUT_SESSIONS,
    "mixture": WITH_SESSIONS,
}
"""By workload the peers that are compared everywhere; the set ``peers`` shows that no other
is the best."""
ANSWERED: Final = tuple(
    f"{name}-{split}" for name in ("llm-d", "llm-d-2000") for split in ("5+3", "6+2", "7+1")
)
"""Fixed splits that whole answers are compared with."""
ANSWER_WORKLOADS: Final = ("conversation", "agents", "mixture")
ANSWER_LOADS: Final = (0.5, 0.65, 0.8, 0.95)
NETWORKS_GBIT_S: Final = (100.0, 25.0, 400.0)
SEARCH: Final = Search(low=0.5, high=1.1, tolerance=0.08)


def all_cases(names: Iterable[str]) -> list[Case]:
    """Return every case for the contenders of these names; raise `BenchError` without ours."""
    known = tuple(names)
    if OURS not in known:
        raise BenchError(f"the driver has no contender {OURS!r}, only: {', '.join(known)}")
    everything = known
    known = tuple(each for each in known if each not in ANSWERS and not is_split(each))
    peers = tuple(each for each in known if is_peer(each))
    bounds = tuple(each for each in known if each in BOUNDS)
    return [
        *headline(known, bounds),
        *regimes(known),
        *ablations((OURS, *(each for each in known if is_variant(each)))),
        *goodput(known, bounds),
        *streaming(known),
        *faults(known),
        *every_peer((OURS, *peers, *bounds)),
        *answers(
            tuple(each for each in everything if each in (OURS, *ANSWERS) or each in ANSWERED)
        ),
    ]


def leading(workload: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ours and those of the known peers that lead a workload."""
    return (OURS, *(each for each in known if each in LEADING[workload]))


def headline(known: tuple[str, ...], bounds: tuple[str, ...]) -> list[Case]:
    """Return the cases that the README shows."""
    return [
        _at(place, "headline", (*leading(place.workload, known), *bounds)) for place in HEADLINE
    ]


def regimes(known: tuple[str, ...]) -> list[Case]:
    """Return all other loads and RAM, and slow disks."""
    others = [each for each in EVERYWHERE if each not in HEADLINE]
    slow = [Place(workload, min(RAM), 0.8) for workload in TRACED]
    return [
        _at(place, "regimes", leading(place.workload, known), disk=disk)
        for disk, places in (("fast", others), ("slow", slow))
        for place in places
    ]


def goodput(known: tuple[str, ...], bounds: tuple[str, ...]) -> list[Case]:
    """Return the searches; without a queue every load is met, and nothing would be found."""
    queueing = tuple(each for each in bounds if each != "no-queue")
    return [
        _case("goodput", workload, (*leading(workload, known), *queueing), search=SEARCH)
        for workload in TRACED
    ]


def every_peer(contenders: tuple[str, ...]) -> list[Case]:
    """Return the headline's workloads for all peers and bounds, in a small size."""
    return [_case("peers", workload, contenders, load=0.8) for workload in TRACED]


def answers(contenders: tuple[str, ...]) -> list[Case]:
    """Return the cases of whole answers: remote prefills against fixed splits."""
    return [
        _case(
            "answers",
            workload,
            contenders,
            load=load,
            decode="by-context",
            network_gbit_s=gbit_s,
        )
        for gbit_s in NETWORKS_GBIT_S
        for workload in ANSWER_WORKLOADS
        for load in ANSWER_LOADS
    ]


def ablations(contenders: tuple[str, ...]) -> list[Case]:
    """Return ours and its variants, each with one mechanism less or one more."""
    return [
        _case("ablations", workload, contenders, load=load, ram=ram)
        for workload, load, ram in ABLATED
    ]


def faults(known: tuple[str, ...]) -> list[Case]:
    """Return the traces with a replica in trouble."""
    return [
        _case("faults", workload, leading(workload, known), load=0.8, fault=fault)
        for workload in TRACED
        for fault in FAULTS
    ]


def streaming(known: tuple[str, ...]) -> list[Case]:
    """Return the headline's mixture, of which a third is not streamed, with all of it streamed."""
    return [_case("streaming", "mixture", leading("mixture", known), load=0.8, all_streamed=True)]


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


def _at(place: Place, set_name: str, contenders: tuple[str, ...], **more: Any) -> Case:
    if place.pause_scale != 1:
        more["pause_scale"] = place.pause_scale
    return _case(set_name, place.workload, contenders, load=place.load, ram=place.ram, **more)


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
    parts += [f"net{more['network_gbit_s']:g}" if "network_gbit_s" in more else ""]
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
        tpot_bound_s=TPOT_BOUND_S.get(workload, Case.tpot_bound_s),
        **more,
    )
