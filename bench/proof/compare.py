"""Contenders compared: rows, ratios with intervals, the best peer, and what each mechanism earns.

A mechanism stays where it earns more than its interval on some workload that people have, and
nowhere costs more than 5%. It earns where p90 or mean TTFT without it is above that with it,
beyond the interval. It costs where either is more than 5% below, and below beyond the interval.
The same rule holds for a mechanism that our router is without (``ours-with-NAME``): "keep" then
means that it deserves a place. Other variants are reported as their time over ours, without a
verdict.

A mechanism that does nothing still passes one comparison in forty by chance. Read the verdict
together with the number of regimes in which the mechanism earns. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.proof.case import OURS, adds, is_peer, is_variant, mechanism
from bench.proof.figures import (
    Estimate,
    Goodput,
    Point,
    bound_key,
    geometric,
    goodput,
    over_seeds,
    ratio,
)
from bench.proof.results import Result, Row

Metric = Literal[
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "total_p50_s",
    "total_p90_s",
    "output_token_p50_s",
    "output_token_p90_s",
]
P90: Final[Metric] = "ttft_p90_s"
MEAN: Final[Metric] = "ttft_mean_s"


@dataclass(frozen=True, kw_only=True)
class Told:
    """An estimate, and on which side of it the truth lies where the measured loads ended."""

    estimate: Estimate
    beyond: Literal["", "at least", "at most", "about"] = ""


def rows(result: Result, contender: str) -> list[Row]:
    """Return a contender's plays, seed by seed."""
    return sorted(
        (each for each in result.runs if each.contender == contender),
        key=lambda each: (each.seed, each.label),
    )


def met_both(result: Result, contender: str) -> list[float]:
    """Return the shares of a contender's requests within both bounds, seed by seed."""
    return [each.figures.met_both or 0.0 for each in rows(result, contender)]


def peers(result: Result) -> list[str]:
    """Return the other routers that took part."""
    return [each for each in result.case.contenders if is_peer(each)]


def times(result: Result, contender: str, metric: Metric) -> list[float | None]:
    """Return a time by seed; None: infinite."""
    return [getattr(each.figures, metric) for each in rows(result, contender)]


def time(result: Result, contender: str, metric: Metric) -> Estimate | None:
    """Return a time over all seeds; None: infinite in one of them."""
    return geometric(times(result, contender, metric))


def time_ratio(result: Result, one: str, other: str, metric: Metric) -> Estimate | None:
    """Return one contender's time over another's, paired by seed."""
    return ratio(times(result, one, metric), times(result, other, metric))


def failed(result: Result, contender: str) -> float:
    """Return the share of requests that failed, the refused ones included."""
    told = [each.figures for each in rows(result, contender)]
    return sum(each.errors for each in told) / sum(each.requests for each in told)


def best_peer(result: Result, metric: Metric) -> str | None:
    """Return the peer with the least of a time; chosen after the fact, to our disadvantage.

    None where no peer took part.
    """
    known = {each: time(result, each, metric) for each in peers(result)}
    return min(known, key=lambda name: _value(known[name]), default=None)


def _value(estimate: Estimate | None) -> float:
    return math.inf if estimate is None else estimate.value


def goodputs(result: Result, contender: str) -> list[Goodput]:
    """Return a contender's goodput by seed."""
    return [
        goodput(points(result, contender, seed))
        for seed in result.case.seeds
        if points(result, contender, seed)
    ]


def points(result: Result, contender: str, seed: int) -> list[Point]:
    """Return the measured curve of one seed: real load, share of requests within the bound."""
    loads = {(each.seed, each.label): each.real_load for each in result.workloads}
    key = bound_key(result.case.bound_s)
    return [
        Point(load=loads[each.seed, each.label], share=each.figures.met[key])
        for each in rows(result, contender)
        if each.seed == seed
    ]


def goodput_over_seeds(result: Result, contender: str) -> Told:
    """Return a contender's goodput."""
    found = goodputs(result, contender)
    return Told(estimate=over_seeds([each.load for each in found]), beyond=_beyond(found))


def _beyond(found: Sequence[Goodput]) -> Literal["", "at least", "at most", "about"]:
    """Return on which side the truth lies where a search ended before it was found."""
    ends = {each.beyond for each in found} - {None}
    if len(ends) == 2:
        return "about"
    if not ends:
        return ""
    return "at least" if ends == {"above"} else "at most"


PEOPLE_HAVE: Final = ("agents", "conversation", "rounds", "burst", "mixture")
"""Prompts that share nothing are a bound, not a workload."""
MOST_COST: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One mechanism in one case: a time without it over that with it; above 1 it earns."""

    case: str
    workload: str
    p90: Estimate | None
    mean: Estimate | None

    @property
    def earns(self) -> bool:
        """Whether it does, beyond the interval, on a workload that people have."""
        known = [each for each in (self.p90, self.mean) if each is not None]
        return self.workload in PEOPLE_HAVE and any(each.low > 1 for each in known)

    @property
    def costs(self) -> bool:
        """Whether it costs more than it may, and not by chance."""
        known = [each for each in (self.p90, self.mean) if each is not None]
        return any(each.value < 1 / (1 + MOST_COST) and each.high < 1 for each in known)


@dataclass(frozen=True, kw_only=True)
class Earned:
    """One mechanism everywhere."""

    name: str
    """Name of the mechanism, or of the variant if it is not with or without one."""
    is_mechanism: bool
    effects: tuple[Effect, ...]

    @property
    def earns_in(self) -> int:
        """In how many cases it earns."""
        return sum(each.earns for each in self.effects)

    @property
    def costs_in(self) -> int:
        """In how many cases it costs."""
        return sum(each.costs for each in self.effects)

    @property
    def verdict(self) -> Literal["keep", "lose", ""]:
        """Whether the mechanism keeps its place or deserves one; empty for other variants."""
        if not self.is_mechanism:
            return ""
        return "keep" if self.earns_in > 0 and self.costs_in == 0 else "lose"


def earned(results: Sequence[Result]) -> list[Earned]:
    """Return what each mechanism earns, from the results of the ablations."""
    names = [name for each in results for name in each.case.contenders if is_variant(name)]
    return [
        Earned(
            name=mechanism(name) or name,
            is_mechanism=mechanism(name) is not None,
            effects=tuple(_effect(each, name) for each in results if name in each.case.contenders),
        )
        for name in dict.fromkeys(names)
    ]


def _effect(result: Result, variant: str) -> Effect:
    without, with_it = (OURS, variant) if adds(variant) else (variant, OURS)
    return Effect(
        case=result.case.name,
        workload=result.case.workload,
        p90=time_ratio(result, without, with_it, P90),
        mean=time_ratio(result, without, with_it, MEAN),
    )
