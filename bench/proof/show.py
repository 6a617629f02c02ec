"""One result for a terminal, and the requests on which ours lost most. Pure."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.proof import tables
from bench.proof.case import OURS
from bench.proof.compare import goodput_over_seeds, rows, times
from bench.proof.figures import Figures, bound_key, difference
from bench.proof.records import Columns
from bench.proof.results import Result

_SHARES: Final[tuple[tuple[str, Callable[[Figures], float | None]], ...]] = (
    ("gpu", lambda each: each.hits["gpu"]),
    ("cpu", lambda each: each.hits["cpu"]),
    ("disk", lambda each: each.hits["disk"]),
    ("moved", lambda each: each.moved),
    ("spilled", lambda each: each.spilled),
)
_NUMBERS: Final[tuple[tuple[str, Callable[[Figures], float | None]], ...]] = (
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
        f"{', '.join(binds)} binds, bounds {case.bound_s:g} s (TTFT) and "
        f"{1000 * case.tpot_bound_s:g} ms (TPOT); model seconds; "
        f"made at {result.machine.get('commit')}"
    )
    if case.search is not None:
        return f"{title}\n{_goodputs(result)}"
    return f"{title}\n{_times(result)}\n\n{_reasons(result)}"


def _goodputs(result: Result) -> str:
    lines = [
        [name, tables.told(goodput_over_seeds(result, name))] for name in result.case.contenders
    ]
    return tables.plain(["", "goodput"], lines)


def _times(result: Result) -> str:
    head = ["", *(column for column, _ in tables.COLUMNS)]
    head += ["less ours", "in time", "and TPOT", "errors", "429s"]
    lines = []
    for name in result.case.contenders:
        figures = [each.figures for each in rows(result, name)]
        key = bound_key(result.case.bound_s)
        lines.append(
            [
                name,
                *(tables.told_time(result, name, each) for _, each in tables.COLUMNS),
                _less_ours(result, name),
                tables.percent(statistics.fmean(each.met[key] for each in figures)),
                _mean(figures, lambda each: each.met_both, tables.percent),
                str(sum(each.errors for each in figures)),
                str(sum(each.refused for each in figures)),
            ]
        )
    return tables.plain(head, lines)


def _less_ours(result: Result, name: str) -> str:
    if OURS not in result.case.contenders:
        return "-"
    theirs, ours = times(result, name, "ttft_mean_s"), times(result, OURS, "ttft_mean_s")
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if a is not None and b is not None]
    if name == OURS or not pairs:
        return "-"
    return tables.interval(difference([a for a, _ in pairs], [b for _, b in pairs]))


def _reasons(result: Result) -> str:
    lines = []
    for name in result.case.contenders:
        figures = [each.figures for each in rows(result, name)]
        line = [name]
        line += [_mean(figures, get, tables.percent) for _, get in _SHARES]
        line += [_mean(figures, get, tables.number) for _, get in _NUMBERS]
        lines.append(line)
    return tables.plain(["", *(name for name, _ in (*_SHARES, *_NUMBERS))], lines)


def _mean(
    figures: Sequence[Figures],
    get: Callable[[Figures], float | None],
    told: Callable[[float], str],
) -> str:
    known = [value for each in figures if (value := get(each)) is not None]
    return told(statistics.fmean(known)) if known else "-"


Kept = Mapping[str, Any]
"""What is kept of a request: `Columns.row`."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A request that ours served later; times in model seconds."""

    number: int
    lost_s: float
    ours: Kept
    theirs: Kept


def lost(ours: Columns, theirs: Columns) -> list[Lost]:
    """Return the requests that both answered, from the greatest loss to the greatest gain."""
    other = {each: at for at, each in enumerate(theirs.number)}
    found = [
        Lost(
            number=number,
            lost_s=(ours.ttft_ms[at] - theirs.ttft_ms[other[number]]) / 1000,
            ours=ours.row(at),
            theirs=theirs.row(other[number]),
        )
        for at, number in enumerate(ours.number)
        if number in other and ours.ttft_ms[at] >= 0 and theirs.ttft_ms[other[number]] >= 0
    ]
    return sorted(found, key=lambda each: each.lost_s, reverse=True)


def summary(requests: Sequence[Lost], count: int) -> str:
    """Return how much was lost and gained in all, and by which of the router's reasons."""
    behind = [each for each in requests if each.lost_s > 0]
    lost_s = sum(each.lost_s for each in behind)
    gained_s = sum(each.lost_s for each in requests) - lost_s
    first_s = sum(each.lost_s for each in behind[:count])
    by_reason: Counter[str] = Counter()
    for each in behind:
        by_reason[str(each.ours["reason"])] += round(each.lost_s)
    reasons = ", ".join(f"{reason} {seconds} s" for reason, seconds in by_reason.most_common())
    return (
        f"{len(behind)} of {len(requests)} requests were answered later, by {lost_s:.0f} s in all "
        f"(the first {count}: {first_s:.0f} s), the others sooner by {-gained_s:.0f} s\n"
        f"lost by reason: {reasons or '-'}"
    )


def costliest_table(requests: Sequence[Lost], other: str) -> str:
    """Return a line for each request: both decisions, with what was found where."""
    head = ["request", "turn", "due s", "tokens", "lost s", "ours: reason", "replica", "TTFT s"]
    head += ["predicted", "before", "gpu/cpu/disk", "computed", f"{other}: replica", "TTFT s"]
    head += ["gpu/cpu/disk", "computed"]
    return tables.plain(head, [_line(each) for each in requests])


def _line(each: Lost) -> list[str]:
    mine, other = each.ours, each.theirs
    return [
        str(each.number),
        str(mine["turn"]),
        f"{mine['due_s']:.1f}",
        str(mine["prompt_tokens"]),
        f"{each.lost_s:.2f}",
        str(mine["reason"] or "-"),
        str(mine["replica"]),
        _seconds(mine["ttft_ms"]),
        _seconds(mine["predicted_ms"]),
        _seconds(mine["before_ms"]),
        _tiers(mine),
        str(mine["computed"]),
        str(other["replica"]),
        _seconds(other["ttft_ms"]),
        _tiers(other),
        str(other["computed"]),
    ]


def _tiers(kept: Kept) -> str:
    return f"{kept['gpu']}/{kept['cpu']}/{kept['disk']}"


def _seconds(milliseconds: int | None) -> str:
    return "-" if milliseconds is None or milliseconds < 0 else f"{milliseconds / 1000:.2f}"
