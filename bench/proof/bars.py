"""What the proof must show, and whether it does. Pure.

A bar is met by the estimate; the table also says whether the whole interval meets it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from bench.proof import tables
from bench.proof.case import OURS, SHARED_CACHE
from bench.proof.cases import HEADLINE_LOADS, HEADLINE_RAM, LEADING
from bench.proof.compare import (
    MEAN,
    P90,
    Told,
    best_goodput_peer,
    best_peer,
    goodput_ratio,
    peers,
    time_ratio,
)
from bench.proof.figures import Estimate
from bench.proof.results import Result

State = Literal["met", "not met", "unknown"]

P90_AT_MOST: Final = {"agents": 0.5, "conversation": 0.8}
"""Ours over the best peer's."""
GOODPUT_AT_LEAST: Final = {"agents": 1.5, "conversation": 1.15}
OF_SHARED_CACHE_AT_LEAST: Final = {"agents": 0.8}
"""Goodput, ours over that of a fleet with one infinite cache."""
NOWHERE_WORSE: Final = 1.05
"""Ours over the best peer's, the better end of the interval."""

_NOT_SURE: Final = ", but not by the whole interval"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One thing to show."""

    what: str
    state: State
    found: str


def bars(results: Sequence[Result]) -> list[Bar]:
    """Return every bar of the proof."""
    return [
        *_p90_bars(results),
        *_goodput_bars(results),
        *_nowhere_worse(results),
        *_left_out(results),
    ]


def _p90_bars(results: Sequence[Result]) -> Iterator[Bar]:
    for workload, most in P90_AT_MOST.items():
        for ram in HEADLINE_RAM:
            for load in HEADLINE_LOADS:
                regime = (workload, ram, "fast", 1.0, load)
                result = _find(results, "headline", regime)
                what = f"{_named(workload, ram)}, {100 * load:.0f}%: p90 at most {most:g}"
                yield _p90_bar(f"{what} of the best peer's", result, most)


def _p90_bar(what: str, result: Result | None, most: float) -> Bar:
    best = None if result is None else best_peer(result, P90)
    if result is None or best is None:
        return _missing(what, "headline")
    ratio = time_ratio(result, OURS, best, P90)
    if ratio is None:
        return Bar(what=what, state="unknown", found=f"both fail too much ({best})")
    sure = "" if ratio.high <= most else _NOT_SURE
    return _bar(what, ratio.value <= most, f"{tables.interval(ratio)} of {best}", sure)


def _goodput_bars(results: Sequence[Result]) -> Iterator[Bar]:
    for workload, least in GOODPUT_AT_LEAST.items():
        for ram in HEADLINE_RAM:
            result = _find(results, "goodput", (workload, ram, "fast", 1.0, None))
            name = _named(workload, ram)
            best = None if result is None else best_goodput_peer(result)
            what = f"{name}: goodput at least {least:g} of the best peer's"
            yield _goodput_bar(what, result, best, least)
            if workload in OF_SHARED_CACHE_AT_LEAST:
                least_of = OF_SHARED_CACHE_AT_LEAST[workload]
                what = f"{name}: goodput at least {least_of:g} of one infinite cache's"
                yield _goodput_bar(what, result, SHARED_CACHE, least_of)


def _goodput_bar(what: str, result: Result | None, other: str | None, least: float) -> Bar:
    if result is None or other is None or other not in result.case.contenders:
        return _missing(what, "goodput")
    ratio = goodput_ratio(result, OURS, other)
    if ratio is None or _is_open(ratio, least):
        found = f"{tables.told(ratio)} of {other}: the search ended before it was decided"
        return Bar(what=what, state="unknown", found=found)
    sure = "" if ratio.estimate.low >= least else _NOT_SURE
    return _bar(what, ratio.estimate.value >= least, f"{tables.told(ratio)} of {other}", sure)


def _is_open(ratio: Told, least: float) -> bool:
    """Whether the truth may lie on the other side of a bar than what was measured."""
    is_met = ratio.estimate.value >= least
    wrong_side = "at most" if is_met else "at least"
    return ratio.beyond in (wrong_side, "about")


def _nowhere_worse(results: Sequence[Result]) -> Iterator[Bar]:
    """Yield a bar for each set: in no case of it is ours clearly behind the best peer."""
    compared = [each for each in results if peers(each)]
    for name in dict.fromkeys(each.case.set for each in compared):
        some = [each for each in compared if each.case.set == name]
        worse = [found for each in some if (found := _worse(each))]
        told = "; ".join(worse) if worse else f"in none of {len(some)} cases"
        what = f"{name}: nowhere worse than the best peer by more than 5% beyond the interval"
        yield _bar(what, not worse, told, "")
    if not compared:
        yield _missing("nowhere worse than the best peer", "headline regimes workloads")


def _worse(result: Result) -> str:
    """Return where ours is clearly behind; empty where it is not."""
    found = [
        f"{result.case.name} {what} {tables.interval(ratio)} of {best}"
        for what, best, ratio in _against_best(result)
        if ratio is not None and ratio.low > NOWHERE_WORSE
    ]
    return ", ".join(found)


def _against_best(result: Result) -> Iterator[tuple[str, str, Estimate | None]]:
    if result.case.search is not None:
        best = best_goodput_peer(result)
        if best is not None:
            inverse = goodput_ratio(result, best, OURS)
            yield "goodput, inverse", best, None if inverse is None else inverse.estimate
        return
    for what, metric in (("p90", P90), ("mean", MEAN)):
        best = best_peer(result, metric)
        if best is not None:
            yield what, best, time_ratio(result, OURS, best, metric)


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
        yield _bar("no peer that is left out of the other cases is the best", not wrong, told, "")


def _find(results: Sequence[Result], set_name: str, regime: tuple[object, ...]) -> Result | None:
    return next(
        (each for each in results if (each.case.set, each.case.regime) == (set_name, regime)), None
    )


def _named(workload: str, ram: float) -> str:
    return f"{workload}, RAM {ram:g}"


def _bar(what: str, is_met: bool, found: str, sure: str) -> Bar:
    return Bar(what=what, state="met" if is_met else "not met", found=found + sure * is_met)


def _missing(what: str, sets: str) -> Bar:
    found = f"no result: python -m bench.proof make --only {sets}"
    return Bar(what=what, state="unknown", found=found)
