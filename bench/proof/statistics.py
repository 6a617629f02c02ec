"""What several seeds say together: means, paired differences and ratios. Pure.

Contenders are compared on equal seeds (the same sessions, the same starts), so each seed
gives one paired observation and what the seeds have in common cancels out. The published
interval is Student's t over these observations, 95%: the paired-t interval under common
random numbers (Law, Simulation Modeling and Analysis, 5th ed., 10.2.1). Requests of one
run are not independent of each other (a queue remembers), so no interval is taken over
them; seeds are independent runs.

Ratios of times are compared by their logarithms, since they are positive and skewed: the
value is the geometric mean over seeds, the interval that of the mean logarithm, and a
ratio and its inverse say the same.

`within_seed` tells how much of it is the choice of sessions: a bootstrap that draws whole
sessions (Field and Welsh, Bootstrapping clustered data, J. R. Stat. Soc. B 69, 2007), the
same ones for both contenders. It is narrower than the truth, as the sessions of a run
share its queues, and is kept beside the published one as a check.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 97.5%, for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).

Of more degrees the last is used: the interval is then too wide by up to 4%.
"""
_RESAMPLES: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95% interval. One seed says nothing of the interval: it is infinite."""

    value: float
    low: float
    high: float
    seeds: int


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of a figure over seeds, with its interval."""
    mean = statistics.fmean(values)
    half = _half_width(values)
    return Estimate(value=mean, low=mean - half, high=mean + half, seeds=len(values))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return ours less theirs, paired by seed."""
    return over_seeds([one - other for one, other in zip(ours, theirs, strict=True)])


def geometric(values: Sequence[float | None]) -> Estimate | None:
    """Return the geometric mean of a time over seeds; None where it is infinite in one."""
    finite = [each for each in values if each is not None]
    if len(finite) < len(values) or not finite:
        return None
    return _exponent(over_seeds([math.log(max(each, 1e-9)) for each in finite]))


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Estimate | None:
    """Return ours over theirs, paired by seed; None of a time is infinite.

    Infinite where ours is infinite in any seed in which theirs is not. A seed in which
    only theirs is infinite is left out as long as there are others, which can only
    understate the gain; where there are none, the ratio is 0. None: both are infinite
    in every seed.
    """
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair != (None, None)]
    if not pairs:
        return None
    if any(one is None for one, _ in pairs):
        return Estimate(value=math.inf, low=math.inf, high=math.inf, seeds=len(pairs))
    logs = [
        math.log(max(one, 1e-9) / max(other, 1e-9))
        for one, other in pairs
        if one is not None and other is not None
    ]
    if not logs:
        return Estimate(value=0.0, low=0.0, high=0.0, seeds=len(pairs))
    return _exponent(over_seeds(logs))


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.inf
    t = _T_975[min(len(values) - 1, len(_T_975)) - 1]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def _exponent(logs: Estimate) -> Estimate:
    high = math.exp(logs.high) if logs.high < math.inf else math.inf
    return Estimate(value=math.exp(logs.value), low=math.exp(logs.low), high=high, seeds=logs.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Values of one run, each with the number of the session it belongs to."""

    values: Sequence[float]
    clusters: Sequence[int]


def within_seed(ours: Clustered, theirs: Clustered, *, share: float, seed: int) -> Estimate | None:
    """Return the ratio of two runs' quantiles, its interval by drawing sessions anew.

    None where a quantile is infinite, in the runs or in a resample.
    """
    names = sorted({*ours.clusters, *theirs.clusters})
    chooser = np.random.default_rng(seed)
    runs = [_sorted_run(each, names) for each in (ours, theirs)]
    every = np.ones(len(names), dtype=np.int64)
    drawn = chooser.multinomial(len(names), np.full(len(names), 1 / len(names)), _RESAMPLES)
    value, *ratios = (
        _quantile(runs[0], weights, share) / _quantile(runs[1], weights, share)
        for weights in (every, *drawn)
    )
    if not all(math.isfinite(each) and each > 0 for each in (value, *ratios)):
        return None
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(value=value, low=float(low), high=float(high), seeds=1)


_Run = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Values in rising order, and for each the index of its cluster."""


def _sorted_run(run: Clustered, names: Sequence[int]) -> _Run:
    values = np.asarray(run.values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    indices = np.searchsorted(np.asarray(names), np.asarray(run.clusters))
    return values[order], indices[order]


def _quantile(run: _Run, weights: npt.NDArray[Any], share: float) -> float:
    """Return the nearest-rank quantile, each value counted as often as its cluster is drawn."""
    values, indices = run
    counted = np.cumsum(weights[indices])
    if not len(counted) or counted[-1] == 0:
        return math.nan
    rank = max(1, math.ceil(share * int(counted[-1])))
    return float(values[np.searchsorted(counted, rank)])
