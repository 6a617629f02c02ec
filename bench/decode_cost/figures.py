"""What the samples of a run say. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from bench.decode_cost.situations import GROUPS, Pace, Situation
from bench.replica.intervals import Interval, interval
from bench.stress.inside.lock import Durations

MOST_RATIO: Final = 1.05
"""Beyond it what causes it is to leave vLLM's process."""
_TIMER_S: Final = 0.0001
"""What a thread is late by timer alone, at most."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """How late the probe's thread woke once, and of that how long it had no core."""

    late_s: float
    without_core_s: float

    @property
    def gil_s(self) -> float:
        """What neither the timer nor a missing core explains."""
        return max(0.0, self.late_s - self.without_core_s - _TIMER_S)


@dataclass(frozen=True, kw_only=True)
class Step:
    """From the end of one step to that of the next, of the thread that makes them."""

    seconds: float
    computed_s: float
    without_core_s: float
    """Ready to run, while something else had the core."""

    @property
    def with_core_s(self) -> float:
        """What the step would have taken, had a core always been free for its thread."""
        return self.seconds - self.without_core_s

    @property
    def asleep_s(self) -> float:
        """Neither: it waited for the interpreter's lock, or for something to do."""
        return max(0.0, self.with_core_s - self.computed_s)


@dataclass(frozen=True, kw_only=True)
class Window:
    """One situation of one round."""

    situation: Situation
    round: int
    seconds: float
    gaps_s: Sequence[float]
    """Between tokens of the same answer, at its client."""
    steps: Sequence[Step]
    """Of the scheduler, each of which has a token of every answer."""
    delays: Sequence[Delay]
    moved_bytes: int
    failures: int
    """Turns of the engine's work in which not all chunks came."""
    lock: Mapping[str, Durations]
    """How long the engine's lock was held, computed in and waited for; empty without an engine."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return what so large a share of the values is at most; NaN if there are none."""
    ordered = sorted(values)
    return (
        ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
    )


Figure = Callable[[Window], float]


def _step_quantile(part: str, share: float) -> Figure:
    return lambda window: quantile([getattr(each, part) for each in window.steps], share)


def _step_mean(part: str) -> Figure:
    return lambda window: fmean(getattr(each, part) for each in window.steps)


FIGURES: Final[Mapping[str, Figure]] = {
    "step_p50_ms": _step_quantile("seconds", 0.5),
    "step_p99_ms": _step_quantile("seconds", 0.99),
    "step_mean_ms": _step_mean("seconds"),
    "with_core_p50_ms": _step_quantile("with_core_s", 0.5),
    "with_core_p99_ms": _step_quantile("with_core_s", 0.99),
    "with_core_mean_ms": _step_mean("with_core_s"),
    "gap_p50_ms": lambda window: quantile(window.gaps_s, 0.5),
    "gap_p99_ms": lambda window: quantile(window.gaps_s, 0.99),
}
"""Of a window, in seconds, by what they are called in milliseconds."""
PARTS_OF_STEP: Final[Mapping[str, Figure]] = {
    "computed_ms": _step_mean("computed_s"),
    "without_core_ms": _step_mean("without_core_s"),
    "asleep_ms": _step_mean("asleep_s"),
    "asleep_p99_ms": _step_quantile("asleep_s", 0.99),
}
"""What a step is made of: means, but for the last."""


def difference(after: Durations, before: Durations) -> Durations:
    """Return what came between two readings; the longest to the 6% of a bucket."""
    counts = after.counts - before.counts
    return Durations(counts=counts, longest_ns=max(counts, default=0))


def ratio(
    windows: Sequence[Window], situation: Situation, beside: Situation, figure: Figure
) -> Interval:
    """Return a window's figure over that of another situation.

    The rounds' ratios, each of two neighbours in time, are the samples: their geometric mean.
    """
    by_round = {(each.round, each.situation): figure(each) for each in windows}
    return _mean_ratio(_ratios(by_round, situation, beside))


def together(
    windows: Sequence[Window], pace: Pace, *, is_parted: bool, figure: Figure
) -> Interval | None:
    """Return a figure inside over that outside, of all kinds of work; None if nothing was moved.

    The samples are the ratios of all rounds and kinds.
    """
    by_round = {(each.round, each.situation): figure(each) for each in windows}
    found = []
    for situation, *_ in GROUPS:
        if (situation.pace, situation.is_parted) == (pace, is_parted) and situation.twin:
            found += _ratios(by_round, situation, situation.twin)
    return _mean_ratio(found) if found else None


def _ratios(
    by_round: Mapping[tuple[int, Situation], float], situation: Situation, beside: Situation
) -> list[float]:
    return [
        value / by_round[number, beside]
        for (number, mine), value in sorted(by_round.items(), key=lambda item: item[0][0])
        if mine == situation and (number, beside) in by_round
    ]


def _mean_ratio(ratios: Sequence[float]) -> Interval:
    return interval(lambda found: math.exp(fmean(map(math.log, found))), ratios)


def suffers(found: Interval) -> str:
    """Say whether a ratio is beyond `MOST_RATIO`, as far as its interval tells."""
    if found.low > MOST_RATIO:
        return "yes"
    return "no" if found.high <= MOST_RATIO else "not to be told"


def summary(windows: Sequence[Window], situation: Situation) -> dict[str, Any]:
    """Return a situation's figures over all rounds, ready for JSON."""
    mine = [each for each in windows if each.situation == situation]
    delays = [delay for each in mine for delay in each.delays]
    found: dict[str, Any] = {
        "situation": str(situation),
        "tokens": sum(len(each.gaps_s) for each in mine),
        **_medians(mine, FIGURES),
        "step_is_made_of": _medians(mine, PARTS_OF_STEP),
        "moved_gb_per_s": round(
            sum(each.moved_bytes for each in mine) / sum(each.seconds for each in mine) / 1e9, 3
        ),
        "turns_that_failed": sum(each.failures for each in mine),
        "thread_woke_late": _spread([each.late_s for each in delays]),
        "of_it_without_core": _spread([each.without_core_s for each in delays]),
        "of_it_without_gil": _spread([each.gil_s for each in delays]),
        "share_of_time_without_gil": round(_share(mine, delays), 4),
        "lock": _locks(mine),
    }
    others = {"plain": situation.plain, "idle": situation.idle, "outside": situation.twin}
    for called, other in others.items():
        if other is None:
            continue
        for name, figure in FIGURES.items():
            against = ratio(windows, situation, other, figure)
            found[f"{name.removesuffix('_ms')}_over_{called}"] = as_json(against)
    if situation.twin is not None:
        moved = ratio(windows, situation, situation.twin, lambda window: float(window.moved_bytes))
        found["moved_over_outside"] = as_json(moved)
    return found


def as_json(found: Interval) -> dict[str, float | str]:
    """Return a ratio, ready for JSON."""
    return {
        "ratio": round(found.value, 3),
        "low": round(found.low, 3),
        "high": round(found.high, 3),
        "beyond_5_percent": suffers(found),
    }


def _medians(windows: Sequence[Window], figures: Mapping[str, Figure]) -> dict[str, float]:
    return {name: _ms(median(map(figure, windows))) for name, figure in figures.items()}


def _share(windows: Sequence[Window], delays: Sequence[Delay]) -> float:
    return sum(each.gil_s for each in delays) / sum(each.seconds for each in windows)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50_ms": _ms(quantile(values, 0.5)),
        "p99_ms": _ms(quantile(values, 0.99)),
        "p99.9_ms": _ms(quantile(values, 0.999)),
        "max_ms": _ms(max(values, default=math.nan)),
    }


def _locks(windows: Sequence[Window]) -> dict[str, dict[str, float]]:
    found = {}
    for name in sorted({name for each in windows for name in each.lock}):
        together = Durations()
        for each in windows:
            together.merge(each.lock.get(name, Durations()))
        found[name] = {
            "count": together.counts.total(),
            **{
                f"{label}_ms": _ms(together.quantile_ns(share) / 1e9)
                for label, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
            },
            "max_ms": _ms(together.longest_ns / 1e9),
        }
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
