"""The proof's plots, as PNG: goodput curves and distributions of TTFT."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: there is no screen

import matplotlib.pyplot as plt

from bench.proof.case import BOUNDS, OURS
from bench.proof.compare import P90, points, time
from bench.proof.figures import MET_SHARE, monotone
from bench.proof.records import Columns
from bench.proof.results import Result
from bench.proof.tables import PLOTS, case_label

_DPI: Final = 110
_SHOWN_LOAD: Final = 0.8
_LONGEST_BAR_S: Final = 20.0
"""Longer ones are cut, and say how long they are."""
_BARS: Final = {
    OURS: ("Warmroute", "#1f6fd1"),
    "vllm-kv-aware": ("vLLM router, KV-aware", "#f28e2b"),
    "vllm-kv-aware-sessions": ("vLLM router, KV-aware with sessions", "#b07aa1"),
    "vllm-cache-aware-tuned": ("vLLM router, cache-aware (tuned)", "#8c8c8c"),
    "llm-d-affinity": ("llm-d, prefix scorer with affinity", "#59a14f"),
}
"""Name and colour of each router that leads somewhere: one colour a router."""


def write_plots(
    directory: Path, results: Sequence[Result], records: Callable[[Result], list[Columns]]
) -> list[Path]:
    """Draw what there are results for; return the files."""
    searched = [each for each in results if each.case.search is not None]
    headline = [
        each for each in results if (each.case.set, each.case.load) == ("headline", _SHOWN_LOAD)
    ]
    drawn = {"goodput": (searched, _draw_goodput), "ttft": (headline, _ttft_drawer(records))}
    written = []
    for name, (some, draw) in drawn.items():
        if some:
            written.append(directory / PLOTS[name])
            _save(written[-1], some, draw)
    if headline:
        written.append(directory / PLOTS["p90"])
        _save_p90(written[-1], headline)
    return written


def _save_p90(path: Path, results: Sequence[Result]) -> None:
    """Draw the p90 TTFT of every router as bars, with intervals, a group for each case."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.5 * len(results)), layout="constrained")
    positions, labels, at = [], [], 0.0
    for result in results:
        routers = [each for each in result.case.contenders if each in _BARS]
        for offset, router in enumerate(routers):
            name, colour = _BARS[router]
            if (p90 := time(result, router, P90)) is None:
                continue
            end = min(p90.value, _LONGEST_BAR_S)
            axes.barh(at + offset, end, color=colour, label=name, height=0.8)
            if isfinite(p90.high) and p90.high < _LONGEST_BAR_S:  # a single seed has no interval
                end = p90.high
                errors = [[p90.value - p90.low], [p90.high - p90.value]]
                axes.errorbar(p90.value, at + offset, xerr=errors, color="black", linewidth=0.8)
            axes.annotate(f" {p90.value:.1f} s", (end, at + offset), va="center", fontsize=8)
        positions.append(at + (len(routers) - 1) / 2)
        pauses = ", long pauses" if result.case.pause_scale != 1 else ""
        labels.append(f"{result.case.workload}{pauses},\nCPU RAM {result.case.ram:g}x GPU cache")
        at += len(routers) + 0.8
    axes.set_yticks(positions, labels, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="p90 time to first token, seconds (8 simulated replicas, 80% load)")
    by_name = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        by_name.values(),
        by_name.keys(),
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)


def _save(path: Path, results: Sequence[Result], draw: Callable[[Any, Result], None]) -> None:
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for each, result in zip(axes.flat, results, strict=False):
        draw(each, result)
        each.set_title(case_label(result.case), fontsize=10)
        each.grid(alpha=0.3)
    for unused in axes.flat[len(results) :]:
        unused.set_visible(False)
    figure.legend(*_legend(axes.flat), loc="outside lower center", ncols=4, fontsize=8)
    # Without the library's version, so that equal plots are equal files.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Return the lines of all axes, each name once."""
    by_name = {
        label: handle
        for each in axes
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True)
    }
    return list(by_name.values()), list(by_name)


def _draw_goodput(axes: Any, result: Result) -> None:
    for name, look in _looks(result.case.contenders).items():
        curve = monotone(
            [each for seed in result.case.seeds for each in points(result, name, seed)]
        )
        loads = [each.load for each in curve]
        axes.plot(loads, [each.share for each in curve], label=name, **look)
    axes.axhline(MET_SHARE, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="load", ylabel=f"first token within {result.case.bound_s:g} s", ylim=(0, 1.02))


def _ttft_drawer(records: Callable[[Result], list[Columns]]) -> Callable[[Any, Result], None]:
    def draw(axes: Any, result: Result) -> None:
        looks = _looks(result.case.contenders)
        for each in records(result):
            answered = sorted(time for time in each.ttfts_s if time != float("inf"))
            shares = [(at + 1) / len(each.ttft_ms) for at in range(len(answered))]
            axes.step(answered, shares, where="post", label=each.contender, **looks[each.contender])
        axes.set(xlabel="time to first token (model seconds)", ylabel="share of requests")
        axes.set(xscale="log", ylim=(0, 1))

    return draw


def _looks(contenders: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Return a look for each line: ours thick, what no router could be dotted."""
    looks: dict[str, dict[str, Any]] = {}
    for at, name in enumerate(contenders):
        style = ":" if name in BOUNDS else "-" if at < 10 else "--"
        width = 2.4 if name == OURS else 1.2
        colour = _BARS[name][1] if name in _BARS else f"C{at % 10}"
        looks[name] = {"color": colour, "linestyle": style, "linewidth": width}
    return looks
