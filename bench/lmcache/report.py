"""What the demo measured: LMCache's column beside ours, as a table and as JSON."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.replica.demo_report import ROWS, Sample
from bench.ttft import machine


def table(samples: Mapping[str, Sequence[Sample]], rounds: int) -> str:
    """Return a row for each place of the KV, and the medians of each kind of replica."""
    first = next(iter(samples.values()))
    lines = [
        f"\nTime to first token in seconds, {first[0].prompt_tokens} tokens, median of {rounds}; "
        "times sooner than cold\n",
        f"{'':<34}" + "".join(f"{kind:>24}" for kind in samples),
    ]
    lines.append("-" * len(lines[-1]))
    for row, label in ROWS.items():
        cells = (_cell(each, row) for each in samples.values())
        lines.append(f"{label:<34}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _cell(samples: Sequence[Sample], row: str) -> str:
    median_s, cold_s = _median(samples, row), _median(samples, "cold")
    if median_s is None or cold_s is None:
        return "-"
    return f"{median_s:.3f}  {cold_s / median_s:6.1f}"


def _median(samples: Sequence[Sample], row: str) -> float | None:
    seconds = [each.ttft_s for each in samples if each.row == row]
    return statistics.median(seconds) if seconds else None


def report(
    arguments: argparse.Namespace, samples: Mapping[str, Sequence[Sample]]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    settings = {name: getattr(arguments, name) for name in ("tokens", "rounds", "seed")}
    return {
        "what": "time to first token by tier: stock LMCache and our own engine behind the router",
        "command": "python -m bench.lmcache.demo "
        + " ".join(f"--{name} {value}" for name, value in settings.items()),
        "machine": machine(),
        "median_ttft_s": {
            kind: {row: _median(each, row) for row in ROWS} for kind, each in samples.items()
        },
        "samples": {kind: [asdict(one) for one in each] for kind, each in samples.items()},
    }
