"""What a result says of its contenders, over its seeds. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.proof.case import is_peer
from bench.proof.figures import bound_key
from bench.proof.goodput import Goodput, Point, goodput
from bench.proof.kept.result import Result, Row
from bench.proof.statistics import Estimate, geometric, over_seeds, ratio

Metric = Literal[
    "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "total_p50_s", "total_p90_s"
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
    return Told(
        estimate=over_seeds([each.load for each in found]), beyond=_beyond(found, raised="above")
    )


def goodput_ratio(result: Result, one: str, other: str) -> Told | None:
    """Return one contender's goodput over another's, paired by seed."""
    ours, theirs = goodputs(result, one), goodputs(result, other)
    found = ratio([each.load for each in ours], [each.load for each in theirs])
    if found is None:
        return None
    sides = {_beyond(ours, raised="above"), _beyond(theirs, raised="below")} - {""}
    return Told(estimate=found, beyond=sides.pop() if len(sides) == 1 else _both(sides))


def _both(sides: set[Literal["", "at least", "at most", "about"]]) -> Literal["", "about"]:
    return "about" if sides else ""


def _beyond(
    found: Sequence[Goodput], *, raised: Literal["above", "below"]
) -> Literal["", "at least", "at most", "about"]:
    """Return on which side the truth lies, where ``raised`` is the end that would raise it."""
    ends = {each.beyond for each in found} - {None}
    if len(ends) == 2:
        return "about"
    if not ends:
        return ""
    return "at least" if ends == {raised} else "at most"


def best_goodput_peer(result: Result) -> str | None:
    """Return the peer with the highest goodput; None where no peer took part."""
    return max(
        peers(result),
        key=lambda name: goodput_over_seeds(result, name).estimate.value,
        default=None,
    )
