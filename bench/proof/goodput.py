"""Goodput: the highest load at which nine in ten requests meet a TTFT bound. Pure."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

MET_SHARE: Final = 0.9


class UnreachableError(Exception):
    """A load that the workload cannot be offered at, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The share of requests that met the bound at a measured load."""

    load: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A load; where the curve never crosses the share, the last that was measured."""

    load: float
    beyond: Literal["above", "below"] | None = None
    """Where the true one lies: the bound was met at all loads, or at none."""


def find_goodput(
    measure: Callable[[float], float],
    low: float,
    high: float,
    tolerance: float,
    *,
    share: float = MET_SHARE,
) -> list[Point]:
    """Bisect between two loads until they are within ``tolerance``; return what was measured.

    ``measure`` returns the share at a load, or raises `UnreachableError`, which is a limit from
    above. The ends are taken for granted, as measuring them would cost two runs more: a
    curve that does not cross between them is told by `goodput` as lying beyond.
    Raises `UnreachableError` where no load could be measured.
    """
    points: list[Point] = []
    refusal: UnreachableError | None = None
    while high - low > tolerance:
        middle = (low + high) / 2
        try:
            points.append(Point(load=middle, share=measure(middle)))
        except UnreachableError as error:
            refusal, high = error, middle
            continue
        if points[-1].share >= share:
            low = middle
        else:
            high = middle
    if not points:
        raise refusal or UnreachableError(f"no load between {low:g} and {high:g} to measure")
    return points


def goodput(points: Sequence[Point], *, share: float = MET_SHARE) -> Goodput:
    """Return where a curve falls below ``share``, straight between measured loads.

    The curve is first made monotone (`monotone`): more load cannot serve more requests in
    time, so a rise is noise. Raises `ValueError` without a point.
    """
    curve = monotone(points)
    if not curve:
        raise ValueError("goodput of no points")
    if curve[0].share < share:
        return Goodput(load=curve[0].load, beyond="below")
    for before, after in itertools.pairwise(curve):
        if after.share < share:
            part = (before.share - share) / (before.share - after.share)
            return Goodput(load=before.load + part * (after.load - before.load))
    return Goodput(load=curve[-1].load, beyond="above")


def monotone(points: Sequence[Point]) -> list[Point]:
    """Return the non-increasing curve nearest to the points, in order of load.

    Neighbours that rise are pooled to their mean (pool adjacent violators: Barlow,
    Bartholomew, Bremner and Brunk, Statistical Inference under Order Restrictions, 1972).
    """
    ordered = sorted(points, key=lambda each: each.load)
    pools: list[list[float]] = []
    for each in ordered:
        pools.append([each.share])
        while len(pools) > 1 and _mean(pools[-2]) < _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    shares = [_mean(pool) for pool in pools for _ in pool]
    return [Point(load=each.load, share=share) for each, share in zip(ordered, shares, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
