"""One result for a terminal. Pure."""

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from bench.proof.case import OURS
from bench.proof.figures import Figures, bound_key
from bench.proof.kept.result import Result
from bench.proof.report import cells
from bench.proof.report.compare import goodput_over_seeds, rows, time, times
from bench.proof.statistics import difference

_SHARES: Final[tuple[tuple[str, Callable[[Figures], float | None]], ...]] = (
    ("gpu", lambda each: each.hits["gpu"]),
    ("cpu", lambda each: each.hits["cpu"]),
    ("disk", lambda each: each.hits["disk"]),
    ("moved", lambda each: each.moved),
    ("spilled", lambda each: each.spilled),
)
_NUMBERS: Final[tuple[tuple[str, Callable[[Figures], float | None]], ...]] = (
    ("ms/token", lambda each: _thousand(each.output_token_mean_s)),
    ("balance", lambda each: each.balance),
    ("raw load", lambda each: each.played_load),
    ("computed M", lambda each: each.computed_tokens / 1e6),
    ("wasted M", lambda each: each.counts.get("prefetch_unused_tokens", 0.0) / 1e6),
)


def show(result: Result) -> str:
    """Return a result as tables: times with their intervals, then what explains them."""
    case = result.case
    binds = sorted({each.binds for each in result.workloads})
    title = (
        f"{case.name}: {len(case.seeds)} seeds of {case.requests} requests, "
        f"{', '.join(binds)} binds, TTFT bound {case.bound_s:g} s; model seconds; "
        f"made at {result.machine.get('commit')}"
    )
    if case.search is not None:
        return f"{title}\n{_goodputs(result)}"
    return f"{title}\n{_times(result)}\n\n{_reasons(result)}"


def _goodputs(result: Result) -> str:
    lines = [
        [name, cells.told(goodput_over_seeds(result, name))] for name in result.case.contenders
    ]
    return cells.plain(["", "goodput"], lines)


def _times(result: Result) -> str:
    head = ["", "TTFT mean", "less ours", "p50", "p90", "p99", "whole p50", "whole p90"]
    head += ["in time", "errors", "429s"]
    lines = []
    for name in result.case.contenders:
        figures = [each.figures for each in rows(result, name)]
        key = bound_key(result.case.bound_s)
        lines.append(
            [
                name,
                cells.interval(time(result, name, "ttft_mean_s")),
                _less_ours(result, name),
                *(cells.interval(time(result, name, each)) for each in _QUANTILES),
                cells.percent(statistics.fmean(each.met[key] for each in figures)),
                str(sum(each.errors for each in figures)),
                str(sum(each.refused for each in figures)),
            ]
        )
    return cells.plain(head, lines)


_QUANTILES: Final = (
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "total_p50_s",
    "total_p90_s",
)


def _less_ours(result: Result, name: str) -> str:
    if OURS not in result.case.contenders:
        return "-"
    theirs, ours = times(result, name, "ttft_mean_s"), times(result, OURS, "ttft_mean_s")
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if a is not None and b is not None]
    if name == OURS or not pairs:
        return "-"
    return cells.interval(difference([a for a, _ in pairs], [b for _, b in pairs]))


def _reasons(result: Result) -> str:
    lines = []
    for name in result.case.contenders:
        figures = [each.figures for each in rows(result, name)]
        line = [name]
        line += [_mean(figures, get, cells.percent) for _, get in _SHARES]
        line += [_mean(figures, get, cells.number) for _, get in _NUMBERS]
        lines.append(line)
    return cells.plain(["", *(name for name, _ in (*_SHARES, *_NUMBERS))], lines)


def _mean(
    figures: Sequence[Figures],
    get: Callable[[Figures], float | None],
    told: Callable[[float], str],
) -> str:
    known = [value for each in figures if (value := get(each)) is not None]
    return told(statistics.fmean(known)) if known else "-"


def _thousand(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
