"""Plots of a replay, as PNG: TTFT distributions, hits by tier, load over time."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: there is no screen

import matplotlib.pyplot as plt

from bench.record import TIERS, Record
from bench.replay.bound import REPLICA

_DPI: Final = 120
_STEPS: Final = 200
_COLOURS: Final = {"gpu": "#2b6cb0", "cpu": "#63b3ed", "disk": "#f6ad55"}

Runs = Mapping[str, Sequence[Record]]
"""Records by contender."""


def write_plots(directory: Path, title: str, runs: Runs) -> list[Path]:
    """Write the three plots of one workload; return their files."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = title.split(":", maxsplit=1)[0].replace(", ", "-").replace(" ", "")
    drawn = {
        f"{stem}-ttft.png": ttft_distribution(runs),
        f"{stem}-hits.png": hits_by_tier(runs),
        f"{stem}-load.png": load_over_time(runs),
    }
    written = []
    for name, figure in drawn.items():
        figure.suptitle(title, fontsize=10)
        figure.savefig(directory / name, dpi=_DPI)
        plt.close(figure)
        written.append(directory / name)
    return written


def ttft_distribution(runs: Runs) -> Any:
    """Return a figure: share of requests answered within a time, a line for each contender."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for (name, records), look in zip(runs.items(), _looks(), strict=False):
        times = sorted(each.ttft_s for each in records if each.ttft_s is not None)
        if times:
            shares = [(index + 1) / len(times) for index in range(len(times))]
            axes.step(times, shares, where="post", label=name, **look)
    axes.set(xlabel="time to first token (model seconds)", ylabel="share of requests")
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    _legend(axes)
    return figure


def hits_by_tier(runs: Runs) -> Any:
    """Return a figure: share of prompt tokens found in each tier, a bar for each contender."""
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(runs) + 1.8), layout="constrained")
    names = list(runs)
    left = [0.0] * len(names)
    for tier in TIERS:
        shares = [_hit_share(runs[name], tier) for name in names]
        axes.barh(names, shares, left=left, label=tier, color=_COLOURS[tier])
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="prompt tokens found in a tier (%)")
    axes.grid(alpha=0.3, axis="x")
    _legend(axes)
    return figure


def load_over_time(runs: Runs) -> Any:
    """Return a figure: prompt tokens that wait for their first token, mean and worst replica."""
    figure, axes = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for (name, records), look in zip(runs.items(), _looks(), strict=False):
        if name == REPLICA:
            continue
        times, means, worst = waiting_tokens(records)
        axes[0].plot(times, means, label=name, **look)
        axes[1].plot(times, worst, label=name, **look)
    axes[0].set(ylabel="waiting tokens, mean of replicas")
    axes[1].set(ylabel="waiting tokens, worst replica", xlabel="model seconds")
    for each in axes:
        # A contender that collapses would hide all the others.
        each.set_yscale("symlog", linthresh=1_000)
        each.set_ylim(bottom=0)
        each.grid(alpha=0.3)
    _legend(axes[0])
    return figure


def waiting_tokens(
    records: Sequence[Record],
) -> tuple[list[float], list[float], list[float]]:
    """Return times, and the prompt tokens then at replicas without a first token: mean and most.

    The mean is over the replicas that served anything.
    """
    told = [each for each in records if each.arrived_s is not None and each.first_token_s]
    replicas = sorted({str(each.instance_id) for each in told})
    if not told:
        return [], [], []
    first_s = min(each.arrived_s or 0.0 for each in told)
    last_s = max(each.first_token_s or 0.0 for each in told)
    step_s = max((last_s - first_s) / _STEPS, 1e-9)
    waiting = {name: [0.0] * (_STEPS + 1) for name in replicas}
    for each in told:
        begin = int(((each.arrived_s or 0.0) - first_s) / step_s)
        end = int(((each.first_token_s or 0.0) - first_s) / step_s)
        for index in range(begin, min(end, _STEPS) + 1):
            waiting[str(each.instance_id)][index] += each.prompt_tokens
    times = [index * step_s for index in range(_STEPS + 1)]
    columns = list(zip(*waiting.values(), strict=True))
    return times, [sum(each) / len(each) for each in columns], [max(each) for each in columns]


def _looks() -> Iterator[dict[str, Any]]:
    """Yield a look for each line, all different for the first forty."""
    for style in ("-", "--", ":", "-."):
        for colour in range(10):
            yield {"color": f"C{colour}", "linestyle": style, "linewidth": 1.2}


def _hit_share(records: Sequence[Record], tier: str) -> float:
    known = [each for each in records if each.cached_tokens]
    tokens = sum(each.prompt_tokens for each in known)
    return 100 * sum(each.cached_tokens[tier] for each in known) / tokens if tokens else 0.0


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)
