"""The pages' tables, by name, from the results that are there. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.proof.case import BOUNDS, OURS, Case
from bench.proof.kept.result import Result
from bench.proof.report import cells
from bench.proof.report.ablations import earned
from bench.proof.report.compare import (
    MEAN,
    P90,
    Metric,
    best_peer,
    failed,
    goodput_over_seeds,
    time,
    time_ratio,
)
from bench.ttft import BenchError

Results = Sequence[Result]

PLOTS: Final = {"goodput": "goodput.png", "ttft": "ttft.png"}
"""Files beside the results, by what they show."""
_SETS: Final = {
    "headline": ("headline", "goodput"),
    "regimes": ("headline", "regimes"),
    "workloads": ("workloads",),
    "ablations": ("ablations",),
    "faults": ("faults",),
    "streaming": ("streaming",),
    "peers": ("peers",),
}
"""Which sets a table is made of."""


def table(name: str, results: Results) -> str:
    """Return a table in Markdown; raise `BenchError` where it is unknown or has no results."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise BenchError(f"there is no table {name!r}: there are {', '.join(_MAKERS)}")
    there = [each for each in results if each.case.set in _SETS[name]]
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
    amounts = ", ".join(f"{seeds} seeds of {requests:,}" for seeds, requests in sorted(sizes))
    machines = sorted({str(each.machine.get("cpu")) for each in results})
    commits = sorted({str(each.machine.get("commit")) for each in results})
    return (
        f"({amounts} requests after the warm-up, {results[0].case.replicas} replicas, "
        f"95% intervals over seeds; made at {', '.join(commits)} on {', '.join(machines)}.)"
    )


def _headline(results: Results) -> str:
    parts = []
    for workload, ram in dict.fromkeys((each.case.workload, each.case.ram) for each in results):
        some = [each for each in results if (each.case.workload, each.case.ram) == (workload, ram)]
        parts.append(f"**{workload}, CPU RAM {ram:g} times the GPU cache**\n\n{_one_regime(some)}")
    return "\n\n".join(parts)


def _one_regime(results: Results) -> str:
    """Return a row for each contender: goodput, then quantiles of TTFT at each load."""
    search = next((each for each in results if each.case.search is not None), None)
    loads = sorted(
        (each for each in results if each.case.load is not None),
        key=lambda each: each.case.load or 0.0,
    )
    bound_s = results[0].case.bound_s
    head = ["", f"goodput ({bound_s:g} s)"]
    for each in loads:
        head += [f"p50 at {_load(each.case)}", "p90", "p99", "failed"]
    lines = []
    for name in _order(loads or results):
        found = search is not None and name in search.case.contenders
        line = [name, cells.told(goodput_over_seeds(search, name)) if search and found else "-"]
        for each in loads:
            line += _quantiles(each, name)
        lines.append(line)
    return cells.markdown(head, lines)


def _order(results: Results) -> list[str]:
    """Return the contenders: ours, peers from the best, then what no router could be."""
    known = list(dict.fromkeys(name for each in results for name in each.case.contenders))
    last = results[-1]

    def place(name: str) -> tuple[int, float]:
        estimate = time(last, name, P90) if name in last.case.contenders else None
        kind = 0 if name == OURS else 2 if name in BOUNDS else 1
        return kind, float("inf") if estimate is None else estimate.value

    return sorted(known, key=place)


def _quantiles(result: Result, name: str) -> list[str]:
    if name not in result.case.contenders:
        return ["-"] * 4
    p50, p99 = time(result, name, "ttft_p50_s"), time(result, name, "ttft_p99_s")
    share = failed(result, name)
    return [
        cells.INFINITE if p50 is None else cells.number(p50.value),
        cells.interval(time(result, name, P90)),
        cells.INFINITE if p99 is None else cells.number(p99.value),
        cells.percent(share) if share else "0",
    ]


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
    return cells.markdown([*head, *(f"load {_percent(each)}" for each in loads)], lines)


def _place(workload: str, ram: float, disk: str, pause_scale: float) -> str:
    pauses = f", pauses {pause_scale:g} times as long" if pause_scale != 1 else ""
    return f"{workload}, RAM {ram:g}, {disk} disk{pauses}"


def _against_best(result: Result) -> str:
    parts = []
    for metric in (P90, MEAN):
        best = best_peer(result, metric)
        ratio = None if best is None else time_ratio(result, OURS, best, metric)
        parts.append(cells.interval(ratio, none="-"))
    return "<br>".join(parts)


def _ablations(results: Results) -> str:
    ordered = sorted(results, key=lambda each: each.case.regime)
    head = ["without it over with it: p90 of TTFT, then its mean"]
    head += [f"{each.case.workload}, RAM {each.case.ram:g}, {_load(each.case)}" for each in ordered]
    lines = []
    for each in earned(ordered):
        effects = {effect.case: effect for effect in each.effects}
        line = [each.name]
        for result in ordered:
            effect = effects.get(result.case.name)
            line.append(
                "-"
                if effect is None
                else f"{cells.interval(effect.p90, none='-')}<br>"
                f"{cells.interval(effect.mean, none='-')}"
            )
        lines.append([*line, str(each.earns_in), str(each.costs_in), each.verdict])
    return cells.markdown([*head, "earns in", "costs in", ""], lines)


def _faults(results: Results) -> str:
    head = ["p90 of TTFT and failed requests", "ours", "", "best peer", "", ""]
    head += ["p90, ours over the peer's"]
    return cells.markdown(head, [_fault(each) for each in results])


def _fault(result: Result) -> list[str]:
    best = best_peer(result, P90)
    ours = [f"{result.case.workload}, {result.case.fault}", *_p90_and_failed(result, OURS)]
    if best is None:
        return [*ours, "-", "-", "-", "-"]
    ratio = cells.interval(time_ratio(result, OURS, best, P90), none="-")
    return [*ours, best, *_p90_and_failed(result, best), ratio]


def _p90_and_failed(result: Result, name: str) -> list[str]:
    return [cells.interval(time(result, name, P90)), cells.percent(failed(result, name))]


def _streaming(results: Results) -> str:
    """Return a row for each contender: the mixture as it is beside the same one all streamed."""
    ordered = sorted(results, key=lambda each: (each.case.load or 0.0, each.case.all_streamed))
    head = ["p90 of TTFT"]
    head += [
        f"{'all streamed' if each.case.all_streamed else 'a third whole'}, {_load(each.case)}"
        for each in ordered
    ]
    return cells.markdown(head, _times(ordered, P90))


def _peers(results: Results) -> str:
    """Return a row for each contender: p90 of TTFT and its mean in each case."""
    head = [""]
    for each in results:
        head += [f"{each.case.workload}, {_load(each.case)}: p90 of TTFT", "mean"]
    return cells.markdown(head, _times(results, P90, MEAN))


def _times(results: Results, *figures: Metric) -> list[list[str]]:
    """Return a row for each contender: its figures in one result after the other."""
    return [
        [name, *(cells.interval(time(each, name, of)) for each in results for of in figures)]
        for name in _order(results)
    ]


def _load(case: Case) -> str:
    return _percent(case.load or 0.0)


def _percent(load: float) -> str:
    return f"{100 * load:.0f}%"


_MAKERS: Final[Mapping[str, Callable[[Results], str]]] = {
    "headline": _headline,
    "regimes": _matrix,
    "workloads": _matrix,
    "ablations": _ablations,
    "faults": _faults,
    "streaming": _streaming,
    "peers": _peers,
}
