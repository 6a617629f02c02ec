"""What the proof must show, and whether it does. Pure.

Ours is behind another where its time over the other's, paired by seed, is above 1 by more than
the 95% interval. What is found names the largest estimate too: few seeds have wide intervals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

from bench.proof import tables
from bench.proof.case import ANSWERS, OURS, SHARED_CACHE, is_split
from bench.proof.cases import EVERYWHERE, HEADLINE_RAM, LEADING, WORKLOADS, Place
from bench.proof.compare import (
    MEAN,
    P90,
    Metric,
    best_peer,
    failed,
    met_both,
    peers,
    time,
    time_ratio,
)
from bench.proof.figures import Estimate, difference
from bench.proof.results import Result

State = Literal["met", "not met", "unknown"]

ROUNDS_MEAN_AT_MOST_S: Final = 2.5
"""With RAM 0.2 at a load of 80%."""
_ANSWER_RATIOS: Final[tuple[tuple[Metric, float], ...]] = (("total_p90_s", 0.7), (P90, 1.1))
_METRICS: Final = (("mean", MEAN), ("p90", P90))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One thing to show."""

    what: str
    state: State
    found: str


def bars(results: Sequence[Result]) -> list[Bar]:
    """Return every bar of the proof."""
    compared = [
        each for each in results if each.case.load and peers(each) and each.case.set != "answers"
    ]
    return [
        *(_behind_no_peer(workload, compared) for workload in WORKLOADS),
        _no_failures(compared),
        _rounds_mean(results),
        *(_level_with_shared_cache(ram, results) for ram in HEADLINE_RAM),
        *_left_out(results),
        *_answers([each for each in results if {*ANSWERS} < {*each.case.contenders}]),
    ]


def _behind_no_peer(workload: str, compared: Sequence[Result]) -> Bar:
    """Return whether ours is behind the best peer in no case of a workload."""
    what = f"{workload}: mean and p90 at most the best peer's plus its interval"
    some = [each for each in compared if each.case.workload == workload]
    told = {
        f"{each.case.name} {name}": ratio
        for each in some
        for name, metric in _METRICS
        if (best := best_peer(each, metric)) is not None
        and (ratio := time_ratio(each, OURS, best, metric)) is not None
    }
    behind = {name: each for name, each in told.items() if each.low > 1}
    if (missing := _missing_regimes(some, [workload])) and not behind:
        return _missing(what, missing, "headline regimes")
    above = sum(each.value > 1 for each in told.values())
    largest = max(told, key=lambda name: told[name].value)
    found = f"behind in {len(behind)} of {len(told)} figures, above 1 in {above}; " + "; ".join(
        _ratios(behind or {largest: told[largest]})
    )
    return _bar(what, not behind, found)


def _missing_regimes(compared: Sequence[Result], workloads: Sequence[str]) -> str:
    """Return how many results are missing; empty: none."""
    wanted = {_regime(each) for each in EVERYWHERE if each.workload in workloads}
    missing = wanted - {each.case.regime for each in compared}
    return f"{len(missing)} of {len(wanted)} results are missing" if missing else ""


def _regime(place: Place) -> object:
    """Return what `Case.regime` is there, on a fast disk."""
    return place.workload, place.ram, "fast", place.pause_scale, place.load


def _ratios(told: dict[str, Estimate]) -> list[str]:
    return [f"{name} {tables.interval(each)}" for name, each in told.items()]


def _no_failures(compared: Sequence[Result]) -> Bar:
    what = "no failed request where the best peer has none"
    wrong = [
        f"{each.case.name} {tables.percent(failed(each, OURS))}"
        for each in compared
        if failed(each, OURS)
        and any(failed(each, str(best_peer(each, metric))) == 0 for _, metric in _METRICS)
    ]
    if (missing := _missing_regimes(compared, WORKLOADS)) and not wrong:
        return _missing(what, missing, "headline regimes")
    return _bar(what, not wrong, "; ".join(wrong) or f"in none of {len(compared)} cases")


def _rounds_mean(results: Sequence[Result]) -> Bar:
    what = f"rounds, RAM 0.2, 80%: mean at most {ROUNDS_MEAN_AT_MOST_S:g} s"
    result = _find(results, Place("rounds", 0.2, 0.8))
    mean = None if result is None else time(result, OURS, MEAN)
    if mean is None:
        return _missing(what, "no result", "headline")
    return _bar(what, mean.value <= ROUNDS_MEAN_AT_MOST_S, f"{tables.interval(mean)} s")


def _level_with_shared_cache(ram: float, results: Sequence[Result]) -> Bar:
    what = f"agents, RAM {ram:g}, 95%: mean and p90 at most those of one infinite cache"
    result = _find(results, Place("agents", ram, 0.95))
    if result is None or SHARED_CACHE not in result.case.contenders:
        return _missing(what, "no result", "headline")
    told = {
        name: ratio
        for name, metric in _METRICS
        if (ratio := time_ratio(result, OURS, SHARED_CACHE, metric)) is not None
    }
    if not told:
        return Bar(what=what, state="unknown", found="both fail too much")
    return _bar(what, all(each.low <= 1 for each in told.values()), "; ".join(_ratios(told)))


def _left_out(results: Sequence[Result]) -> Iterator[Bar]:
    """Yield whether the peers that most cases do without are not the best where all are."""
    best = [(best_peer(each, P90), each.case) for each in results if each.case.set == "peers"]
    wrong = [
        f"{name} in {case.name}"
        for name, case in best
        if name is not None and name not in LEADING[case.workload]
    ]
    if best:
        told = ", ".join(wrong) + ": add it to LEADING" if wrong else "none is"
        yield _bar("no peer that is left out of the other cases is the best", not wrong, told)


def _answers(answered: Sequence[Result]) -> Iterator[Bar]:
    """Yield what remote prefills must show against today's score and fixed splits."""
    today, split = ANSWERS
    for each in answered:
        others = [name for name in each.case.contenders if is_split(name) or name == today]
        shares = {name: met_both(each, name) for name in (*others, split)}
        best = max(others, key=lambda name: fmean(shares[name]))
        less = difference(shares[split], shares[best])
        found = f"{fmean(shares[split]):.3f} against {fmean(shares[best]):.3f} of {best}"
        is_met = less.value >= 0 or (len(each.case.seeds) > 1 and less.high >= 0)
        yield _bar(f"{each.case.name}: goodput at least the best fixed split's", is_met, found)
        for metric, most in _ANSWER_RATIOS:
            if metric == P90 or (each.case.workload, each.case.load) == ("conversation", 0.8):
                ratio = time_ratio(each, split, today, metric)
                what = f"{each.case.name}: {metric} at most {most:g} of that without"
                told = "-" if ratio is None else tables.interval(ratio)
                yield _bar(what, ratio is not None and ratio.value <= most, told)


def _find(results: Sequence[Result], place: Place) -> Result | None:
    headline = (each for each in results if each.case.set == "headline")
    return next((each for each in headline if each.case.regime == _regime(place)), None)


def _bar(what: str, is_met: bool, found: str) -> Bar:
    return Bar(what=what, state="met" if is_met else "not met", found=found)


def _missing(what: str, missing: str, sets: str) -> Bar:
    found = f"{missing}: python -m bench.proof make --only {sets}"
    return Bar(what=what, state="unknown", found=found)
