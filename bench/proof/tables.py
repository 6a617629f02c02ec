"""The pages' tables in Markdown, by name, and the pages whose marked parts they replace.

``<!-- proof:NAME -->`` and ``<!-- /proof:NAME -->`` are lines of their own. Between them is the
table of that name (`names`), or a plot (`PLOTS`). Pure.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from bench.proof.case import ANSWERS, BOUNDS, OURS, SHARED_CACHE, Case, is_split
from bench.proof.compare import (
    MEAN,
    P90,
    Metric,
    Told,
    best_peer,
    earned,
    failed,
    goodput_over_seeds,
    met_both,
    time,
    time_ratio,
)
from bench.proof.figures import Estimate
from bench.proof.results import Result
from bench.proof.tree import RESULTS
from bench.ttft import BenchError

INFINITE: Final = "∞"
_SIGNS: Final = {"": "", "at least": "≥ ", "at most": "≤ ", "about": "~ "}


def number(value: float) -> str:
    """Return three digits of a number, as far as they are behind the point."""
    if not math.isfinite(value):
        return INFINITE
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def interval(estimate: Estimate | None, *, none: str = INFINITE) -> str:
    """Return a value with its interval in parentheses, where several seeds give one."""
    if estimate is None:
        return none
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)}-{number(estimate.high)})"


def told(each: Told | None) -> str:
    """Return such a value with the side that the truth lies on."""
    return INFINITE if each is None else _SIGNS[each.beyond] + interval(each.estimate)


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}%"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plain(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal, columns as wide as they need to be."""
    everything = [head, *lines]
    widths = [max(len(row[at]) for row in everything) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    )


Results = Sequence[Result]

PLOTS: Final = {"goodput": "goodput.png", "ttft": "ttft.png", "p90": "p90.png"}
"""Files in the folder of the results, by what they show."""
_SETS: Final = {
    "summary": ("headline",),
    "headline": ("headline",),
    "goodput": ("goodput",),
    "regimes": ("headline", "regimes"),
    "ablations": ("ablations",),
    "faults": ("faults",),
    "streaming": ("headline", "streaming"),
    "peers": ("peers",),
    "answers": ("answers",),
}
"""Which sets a table is made of."""
COLUMNS: Final[tuple[tuple[str, Metric], ...]] = (
    ("TTFT mean", MEAN),
    ("p50", "ttft_p50_s"),
    ("p90", P90),
    ("p99", "ttft_p99_s"),
    ("answer p50", "total_p50_s"),
    ("p90", "total_p90_s"),
    ("TPOT p50, ms", "output_token_p50_s"),
    ("p90, ms", "output_token_p90_s"),
)
"""Times of a contender in one case: seconds, but for the time per output token."""


def table(name: str, results: Results) -> str:
    """Return a table in Markdown; raise `BenchError` where it is unknown or has no results."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise BenchError(f"there is no table {name!r}: there are {', '.join(_MAKERS)}")
    there = [each for each in results if each.case.set in _SETS[name]]
    if name == "streaming":
        there = [each for each in there if each.case.workload == "mixture"]
    if not there:
        raise BenchError(
            f"no results for the table {name!r}: python -m bench.proof make "
            f"--only {' '.join(_SETS[name])}"
        )
    return f"{maker(there)}\n\n{provenance(there)}"


def names() -> tuple[str, ...]:
    """Return the names of all tables."""
    return tuple(_MAKERS)


def provenance(results: Results) -> str:
    """Return a sentence of what the results are and where they were made."""
    sizes = {(len(each.case.seeds), each.case.requests) for each in results}
    amounts = ", ".join(
        f"{seeds} seed{'s' if seeds > 1 else ''} of {requests:,}"
        for seeds, requests in sorted(sizes)
    )
    machines = sorted({str(each.machine.get("cpu")) for each in results})
    commits = sorted({str(each.machine.get("commit")) for each in results})
    return (
        f"({amounts} requests after the warm-up, {results[0].case.replicas} replicas, "
        f"95% intervals over seeds; made at {', '.join(commits)} on {', '.join(machines)}.)"
    )


def _summary(results: Results) -> str:
    """Return a row for each case: ours, and ours over the best peer's and one infinite cache's."""
    head = ["time to first token"]
    for name in ("mean", "p90"):
        head += [f"{name}, s", "over the best other router's", "over one infinite cache's"]
    lines = [[case_label(each.case), *_against_both(each), _failed(each, OURS)] for each in results]
    return markdown([*head, "failed"], lines)


def _failed(result: Result, name: str) -> str:
    share = failed(result, name)
    return percent(share) if share else "0"


def _against_both(result: Result) -> list[str]:
    cells = []
    for metric in (MEAN, P90):
        ours = time(result, OURS, metric)
        cells.append(INFINITE if ours is None else number(ours.value))
        for other in (best_peer(result, metric), SHARED_CACHE):
            known = other is not None and other in result.case.contenders
            ratio = time_ratio(result, OURS, str(other), metric) if known else None
            cells.append(interval(ratio, none="-"))
    return cells


def case_label(case: Case) -> str:
    """Return workload, pauses, RAM and, if it is not searched for, load."""
    pauses = f" with pauses {case.pause_scale:g} times as long" if case.pause_scale != 1 else ""
    load = "" if case.load is None else f", {_load(case)}"
    return f"{case.workload}{pauses}, RAM {case.ram:g}{load}"


def _headline(results: Results) -> str:
    """Return a table for each case."""
    return "\n\n".join(f"**{case_label(each.case)}**\n\n{_one_case(each)}" for each in results)


def _one_case(result: Result) -> str:
    """Return a row for each contender; the 95% interval is given of the mean and p90 of TTFT."""
    head = ["", *(name for name, _ in COLUMNS), "failed"]
    lines = []
    for name in _order([result]):
        cells = [told_time(result, name, of, short=of not in (MEAN, P90)) for _, of in COLUMNS]
        lines.append([name, *cells, _failed(result, name)])
    return markdown(head, lines)


def told_time(result: Result, name: str, metric: Metric, *, short: bool = False) -> str:
    """Return a contender's time with its interval, or without: seconds, of TPOT milliseconds."""
    estimate = time(result, name, metric)
    is_token_time = metric.startswith("output_token")
    if estimate is not None and is_token_time:
        scaled = (1000 * each for each in (estimate.value, estimate.low, estimate.high))
        value, low, high = scaled
        estimate = replace(estimate, value=value, low=low, high=high)
    if estimate is not None and short:
        return number(estimate.value)
    return interval(estimate, none="-" if is_token_time else INFINITE)


def _goodput(results: Results) -> str:
    """Return a table for each workload: a row for each contender."""
    parts = []
    for each in results:
        case = each.case
        head = [case_label(case), f"goodput ({case.bound_s:g} s)"]
        names = sorted(case.contenders, key=lambda name: (name != OURS, name in BOUNDS))
        parts.append(
            markdown(head, [[name, told(goodput_over_seeds(each, name))] for name in names])
        )
    return "\n\n".join(parts)


def _order(results: Results) -> list[str]:
    """Return the contenders: ours, peers from the best, then what no router could be."""
    known = list(dict.fromkeys(name for each in results for name in each.case.contenders))
    last = results[-1]

    def place(name: str) -> tuple[int, float]:
        estimate = time(last, name, P90) if name in last.case.contenders else None
        kind = 0 if name == OURS else 2 if name in BOUNDS else 1
        return kind, float("inf") if estimate is None else estimate.value

    return sorted(known, key=place)


def _matrix(results: Results) -> str:
    """Return a row for each workload and machine, a column for each load: ours over best peer."""
    loads = sorted({each.case.load for each in results if each.case.load is not None})
    by_regime = {each.case.regime: each for each in results}
    lines = []
    for place in sorted({each.case.regime[:-1] for each in results}):
        found = [by_regime.get((*place, load)) for load in loads]
        lines.append(
            [_place(*place), *("-" if each is None else _against_best(each) for each in found)]
        )
    head = ["p90 of TTFT, then its mean: ours over the best peer's"]
    return markdown([*head, *(f"load {_percent(each)}" for each in loads)], lines)


def _place(workload: str, ram: float, disk: str, pause_scale: float) -> str:
    pauses = f", pauses {pause_scale:g} times as long" if pause_scale != 1 else ""
    return f"{workload}, RAM {ram:g}, {disk} disk{pauses}"


def _against_best(result: Result) -> str:
    parts = []
    for metric in (P90, MEAN):
        best = best_peer(result, metric)
        ratio = None if best is None else time_ratio(result, OURS, best, metric)
        parts.append(interval(ratio, none="-"))
    return "<br>".join(parts)


def _ablations(results: Results) -> str:
    ordered = sorted(results, key=lambda each: each.case.regime)
    head = ["without it over with it: p90 of TTFT, then its mean"]
    head += [case_label(each.case) for each in ordered]
    lines = []
    for each in earned(ordered):
        effects = {effect.case: effect for effect in each.effects}
        line = [each.name]
        for result in ordered:
            effect = effects.get(result.case.name)
            line.append(
                "-"
                if effect is None
                else f"{interval(effect.p90, none='-')}<br>{interval(effect.mean, none='-')}"
            )
        lines.append([*line, str(each.earns_in), str(each.costs_in), each.verdict])
    return markdown([*head, "earns in", "costs in", ""], lines)


def _faults(results: Results) -> str:
    head = ["p90 of TTFT and failed requests", "ours", "", "best peer", "", ""]
    head += ["p90, ours over the peer's"]
    return markdown(head, [_fault(each) for each in results])


def _fault(result: Result) -> list[str]:
    best = best_peer(result, P90)
    ours = [f"{result.case.workload}, {result.case.fault}", *_p90_and_failed(result, OURS)]
    if best is None:
        return [*ours, "-", "-", "-", "-"]
    ratio = interval(time_ratio(result, OURS, best, P90), none="-")
    return [*ours, best, *_p90_and_failed(result, best), ratio]


def _p90_and_failed(result: Result, name: str) -> list[str]:
    return [interval(time(result, name, P90)), percent(failed(result, name))]


def _streaming(results: Results) -> str:
    """Return a row for each contender: the mixture, as it is and all streamed."""
    ordered = sorted(results, key=lambda each: (each.case.load or 0.0, each.case.all_streamed))
    head = ["p90 of TTFT"]
    head += [
        f"{'all streamed' if each.case.all_streamed else 'a third whole'}, {_load(each.case)}"
        for each in ordered
    ]
    return markdown(head, _times(ordered, P90))


def _peers(results: Results) -> str:
    """Return a row for each contender: p90 of TTFT and its mean in each case."""
    head = [""]
    for each in results:
        head += [f"{each.case.workload}, {_load(each.case)}: p90 of TTFT", "mean"]
    return markdown(head, _times(results, P90, MEAN))


def _answers(results: Results) -> str:
    """Return a row for each case: what each part of the score adds, and the best fixed split."""
    today, paired = ANSWERS
    head = ["p90 of TTFT, p90 of the whole answer, share within both bounds"]
    head += ["first tokens count", "whole answers count", "and remote prefill", "best fixed split"]
    lines = []
    for each in sorted(results, key=lambda each: _answers_place(each.case)):
        if not {*ANSWERS} < {*each.case.contenders}:
            continue
        splits = [name for name in each.case.contenders if is_split(name)]
        best = max(splits, key=lambda name: fmean(met_both(each, name)))
        cells = [_whole(each, name) for name in (today, OURS, paired)]
        workload, load, gbit_s = _answers_place(each.case)
        line = f"{workload}, {_percent(load)}, {gbit_s:g} Gbit/s"
        lines.append([line, *cells, f"{_whole(each, best)} ({best})"])
    return markdown(head, lines)


def _answers_place(case: Case) -> tuple[str, float, float]:
    return case.workload, case.load or 0.0, case.network_gbit_s or 0.0


def _whole(result: Result, name: str) -> str:
    times = [time(result, name, metric) for metric in (P90, "total_p90_s")]
    seconds = ", ".join(f"{INFINITE if each is None else number(each.value)} s" for each in times)
    return f"{seconds}, {percent(fmean(met_both(result, name)))}"


def _times(results: Results, *figures: Metric) -> list[list[str]]:
    """Return a row for each contender: its figures in one result after the other."""
    return [
        [
            name,
            *(
                interval(time(each, name, of)) if name in each.case.contenders else "-"
                for each in results
                for of in figures
            ),
        ]
        for name in _order(results)
    ]


def _load(case: Case) -> str:
    return _percent(case.load or 0.0)


def _percent(load: float) -> str:
    return f"{100 * load:.0f}%"


_MAKERS: Final[Mapping[str, Callable[[Results], str]]] = {
    "summary": _summary,
    "headline": _headline,
    "goodput": _goodput,
    "regimes": _matrix,
    "ablations": _ablations,
    "faults": _faults,
    "streaming": _streaming,
    "peers": _peers,
    "answers": _answers,
}


PAGES: Final = ("README.md", "docs/benchmarks.md", f"{RESULTS}/README.md")
"""The texts with marked parts, from the project's root."""
PLOT_PREFIX: Final = "plot-"
"""Prefix of the marks whose part is a picture."""
_MARK: Final = re.compile(r"^<!-- (/?)proof:([\w-]+) -->$", re.MULTILINE)
_ALT: Final = {
    "goodput": "share of requests whose first token is in time, over load",
    "ttft": "share of requests answered within a time, at 80% load",
    "p90": "p90 time to first token of each router, at 80% load",
}


def rewritten(text: str, part: Callable[[str], str]) -> str:
    """Return a text with each marked part replaced by ``part`` of its name.

    Raises `BenchError` where a mark has no partner.
    """
    made, at = [], 0
    marks = list(_MARK.finditer(text))
    for opening, closing in zip(marks[::2], marks[1::2], strict=False):
        if (opening[1], closing[1]) != ("", "/") or opening[2] != closing[2]:
            raise BenchError(f"{_line(text, opening)} and {_line(text, closing)} are no pair")
        made += [text[at : opening.end()], "\n\n", part(opening[2]).strip(), "\n\n"]
        at = closing.start()
    if len(marks) % 2:
        raise BenchError(f"{_line(text, marks[-1])} has no partner")
    return "".join([*made, text[at:]])


def part_names(text: str) -> list[str]:
    """Return the names of the parts that are marked."""
    return [each[2] for each in _MARK.finditer(text) if not each[1]]


def part_from(results: Results, directory: str) -> Callable[[str], str]:
    """Return what makes the parts; ``directory`` is where plots lie, as the text names it."""

    def part(name: str) -> str:
        plot = name.removeprefix(PLOT_PREFIX)
        if name.startswith(PLOT_PREFIX) and plot in PLOTS:
            return f"![{_ALT[plot]}]({directory}/{PLOTS[plot]})"
        return table(name, results)

    return part


def _line(text: str, mark: re.Match[str]) -> str:
    return f"line {text.count(chr(10), 0, mark.start()) + 1} ({mark[0]})"
