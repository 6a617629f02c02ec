"""The figures of one run and over seeds: TTFT, intervals, goodput. Pure; times in model seconds.

The same requests are reported for every contender: the ones that an ideal fleet has due after the
warm-up (`bench.workloads.offered`), at whatever time this contender had them due. If they were
chosen by the contender's own times, one that answers late would be asked less and report less.

A request that failed, by an error or by a 429, counts as one whose first token never came. So
does a request that was never sent because a turn before it failed. It is in every quantile as an
infinite time, and meets no bound. Means are over answered requests: read them together with the
failures.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from bench.ttft import BenchError, percentile
from replay.record import TIERS, Record
from router.fleet.decision import Reason

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
    """Return the ratio of two runs' quantiles, its interval by resampling sessions.

    None where a quantile is infinite, in the runs or in a resample.
    """
    names = sorted({*ours.clusters, *theirs.clusters})
    chooser = np.random.default_rng(seed)
    runs = [_sorted_run(each, names) for each in (ours, theirs)]
    every = np.ones(len(names), dtype=np.int64)
    drawn = chooser.multinomial(len(names), np.full(len(names), 1 / len(names)), _RESAMPLES)
    value, *ratios = (
        _t_quantile(runs[0], weights, share) / _t_quantile(runs[1], weights, share)
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


def _t_quantile(run: _Run, weights: npt.NDArray[Any], share: float) -> float:
    """Return the nearest-rank quantile, each value counted as often as its cluster is drawn."""
    values, indices = run
    counted = np.cumsum(weights[indices])
    if not len(counted) or counted[-1] == 0:
        return math.nan
    rank = max(1, math.ceil(share * int(counted[-1])))
    return float(values[np.searchsorted(counted, rank)])


REFUSED: Final = 429
"""The status of a request that the router would not hold any longer."""
_NOT_SENT: Final = "not sent"
"""How the driver's error begins of a request whose session had ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time from the end of the warm-up until sessions stop starting."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.until_s - self.from_s

    def of(self, records: Iterable[Record]) -> list[Record]:
        """Return the records of the requests that were due in it."""
        return [each for each in records if self.from_s <= each.due_s < self.until_s]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender, one workload, one seed. A quantile of None is infinite: too many failed."""

    requests: int
    """Reported ones."""
    errors: int
    """Requests that were not answered whole, the refused and the unsent ones included."""
    refused: int
    unsent: int
    """Requests whose session had ended in an error before."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    total_p50_s: float | None
    """From sending a request to the end of its answer."""
    total_p90_s: float | None
    output_token_mean_s: float | None
    """Time for each token of an answer after the first; None: no answer had two."""
    output_token_p90_s: float | None
    met: dict[str, float]
    """By a bound in seconds (`bound_key`): share of requests whose TTFT is within it."""
    hits: dict[str, float]
    """By tier: share of the answered prompts' tokens that were found there."""
    computed_tokens: int
    """Prompt tokens of answered requests that were in no tier of their replica."""
    moved: float | None
    """Share of later turns served by another replica than the turn before."""
    spilled: float | None
    """Share of later turns that the router says left their home (ours alone tells)."""
    balance: float | None
    """Tokens computed by the busiest replica over the mean of all."""
    played_load: float
    """All prompt tokens that were sent in the window over what the fleet prefills in it.

    A contender that answers late is asked less: sessions wait for their answers.
    """
    counts: dict[str, float]
    """What the driver counted over the whole run, warm-up included, such as wasted prefetch."""
    output_token_p50_s: float | None = None
    met_both: float | None = None
    """Share of requests that meet the case's bounds of TTFT and of the time per output token."""


def bound_key(bound_s: float) -> str:
    """Return the name of a TTFT bound in `Figures.met`."""
    return f"{bound_s:g}"


def figures(
    records: Sequence[Record],
    *,
    reported: Sequence[int],
    window: Window,
    replicas: int,
    fleet_tokens_per_s: float,
    bounds_s: Iterable[float],
    both_s: tuple[float, float],
    counts: Mapping[str, float],
) -> Figures:
    """Return the figures of a run, of the requests with the ``reported`` numbers.

    ``both_s``: the bounds of TTFT and of the time per output token that requests must both meet.
    Raises `BenchError` where there are none of them.
    """
    if not reported:
        raise BenchError("the workload has no request to report: its window is empty")
    told = chosen(records, reported)
    done = [each for each in told if answered(each)]
    missing = len(reported) - len(told)
    ttfts = [*map(ttft_s, told), *[math.inf] * missing]
    totals = [*map(_total_s, told), *[math.inf] * missing]
    token_times = [each for record in done if (each := _output_token_s(record)) is not None]
    return Figures(
        requests=len(reported),
        errors=len(reported) - len(done),
        refused=sum(each.status == REFUSED for each in told),
        unsent=missing + sum((each.error or "").startswith(_NOT_SENT) for each in told),
        ttft_mean_s=_mean([ttft_s(each) for each in done]),
        ttft_p50_s=_quantile(ttfts, 0.5),
        ttft_p90_s=_quantile(ttfts, 0.9),
        ttft_p99_s=_quantile(ttfts, 0.99),
        total_p50_s=_quantile(totals, 0.5),
        total_p90_s=_quantile(totals, 0.9),
        output_token_mean_s=_mean(token_times),
        output_token_p50_s=_quantile(token_times, 0.5),
        output_token_p90_s=_quantile(token_times, 0.9),
        met={bound_key(each): _share_within(ttfts, each) for each in bounds_s},
        met_both=sum(_meets(each, *both_s) for each in done) / len(reported),
        hits=_hits(done),
        computed_tokens=sum(each.computed_tokens for each in done),
        moved=_moved(told, records),
        spilled=_spilled(told),
        balance=_balance(done, replicas),
        played_load=sum(each.prompt_tokens for each in window.of(records))
        / (fleet_tokens_per_s * window.length_s),
        counts=dict(counts),
    )


def chosen(records: Iterable[Record], reported: Iterable[int]) -> list[Record]:
    """Return the records with these numbers, as far as they were sent."""
    wanted = frozenset(reported)
    return [each for each in records if each.number in wanted]


def answered(record: Record) -> bool:
    """Whether a request was answered whole; a refusal is none."""
    return record.ok and (record.status or 200) < 400


def ttft_s(record: Record) -> float:
    """Return a request's time to first token; infinite where it failed."""
    return record.ttft_s if answered(record) and record.ttft_s is not None else math.inf


def _total_s(record: Record) -> float:
    return record.total_s if answered(record) and record.total_s is not None else math.inf


def _output_token_s(record: Record) -> float | None:
    if record.output_tokens < 2 or record.ttft_s is None or record.total_s is None:
        return None
    return (record.total_s - record.ttft_s) / (record.output_tokens - 1)


def _meets(record: Record, bound_s: float, tpot_bound_s: float) -> bool:
    return ttft_s(record) <= bound_s and (_output_token_s(record) or 0.0) <= tpot_bound_s


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    found = percentile(values, share)
    return found if math.isfinite(found) else None


def _share_within(ttfts: Sequence[float], bound_s: float) -> float:
    return sum(each <= bound_s for each in ttfts) / len(ttfts)


def _hits(done: Iterable[Record]) -> dict[str, float]:
    known = [each for each in done if each.cached_tokens]
    tokens = sum(each.prompt_tokens for each in known)
    found = {tier: sum(each.cached_tokens.get(tier, 0) for each in known) for tier in TIERS}
    return {tier: found[tier] / tokens if tokens else 0.0 for tier in TIERS}


def _moved(told: Iterable[Record], records: Iterable[Record]) -> float | None:
    """Compare with the turn before, which may lie before the window."""
    places = {each.number: each.instance_id for each in records}
    later = [each for each in told if each.turn > 0 and each.instance_id is not None]
    moved = sum(places.get(each.number - 1) != each.instance_id for each in later)
    return moved / len(later) if later else None


def _spilled(told: Iterable[Record]) -> float | None:
    later = [each for each in told if each.turn > 0 and "reason" in each.headers]
    spilled = sum(each.headers["reason"] == Reason.SESSION_SPILL for each in later)
    return spilled / len(later) if later else None


def _balance(done: Iterable[Record], replicas: int) -> float | None:
    computed: dict[str, int] = defaultdict(int)
    for each in done:
        if each.instance_id is not None:
            computed[each.instance_id] += each.computed_tokens
    total = sum(computed.values())
    return max(computed.values()) * replicas / total if total else None


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
        while len(pools) > 1 and _mean_share(pools[-2]) < _mean_share(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    shares = [_mean_share(pool) for pool in pools for _ in pool]
    return [Point(load=each.load, share=share) for each, share in zip(ordered, shares, strict=True)]


def _mean_share(values: Sequence[float]) -> float:
    return sum(values) / len(values)
