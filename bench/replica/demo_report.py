"""What the demo measured, as a table, as JSON, and whether it went as it should."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from bench.ttft import REASON_HEADER, REPLICA_HEADER, Answer, machine


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured answer."""

    row: str
    ttft_s: float
    prompt_tokens: int
    replica: str
    why: str
    matched: str
    """What the router knew the replica to hold, by tier."""


ROWS: Final = {
    "cold": "cold: nobody has seen it",
    "gpu": "warm: in the GPU tier",
    "cpu": "warm: in CPU RAM",
    "disk": "warm: on disk, with prefetch",
    "disk-plain": "warm: on disk, without prefetch",
    "other": "on the other replica",
}


def known_to_router(answer: Answer) -> str:
    """Return what the router knew and did, from its headers; '-' for nothing."""
    parts = []
    for tier in ("gpu", "cpu", "disk"):
        tokens = int(answer.headers.get(f"x-warmroute-matched-{tier}", 0))
        if tokens:
            parts.append(f"{tier} {tokens}")
    prefetch = answer.headers.get("x-warmroute-prefetch")
    return ", ".join(parts) + (f" [{prefetch}]" if prefetch else "") or "-"


def sample(row: str, answer: Answer, *, directly: str | None = None) -> Sample:
    """Return the figures of an answer; ``directly`` names the replica that was asked itself."""
    return Sample(
        row=row,
        ttft_s=answer.ttft_s,
        prompt_tokens=answer.prompt_tokens or 0,
        replica=directly or answer.headers[REPLICA_HEADER],
        why="asked directly" if directly else answer.headers[REASON_HEADER],
        matched=known_to_router(answer),
    )


def lies_in(matched: Mapping[str, int], tier: str, least_tokens: int) -> bool:
    """Return whether so much of a prompt is matched, and ``tier`` is the fastest of its tiers."""
    fastest = next((name for name in ("gpu", "cpu", "disk") if matched.get(name)), None)
    return fastest == tier and sum(matched.values()) >= least_tokens


def table(samples: Sequence[Sample], rows: Mapping[str, str] = ROWS) -> str:
    """Return the table of medians over the rounds, with the ratio to cold."""
    header = f"{'':<34}{'TTFT s':>9}{'ratio':>8}  {'served by':<11}{'why':<19}known to the router"
    lines = [header, "-" * len(header)]
    cold_s = _median(samples, "cold")
    for row, label in rows.items():
        mine = [each for each in samples if each.row == row]
        if not mine:
            continue
        median_s = _median(samples, row)
        last = mine[-1]
        lines.append(
            f"{label:<34}{median_s:>9.3f}{cold_s / median_s:>8.1f}  "
            f"{last.replica:<11}{last.why:<19}{last.matched}".rstrip()
        )
    return "\n".join(lines)


SMALL_MODEL: Final = "a model of 27 million parameters with 8 KiB of KV a token"


def caption(model: str | None, where: Mapping[str, object]) -> str:
    """Return what the ratios are of: the model and the machine, and how others would differ."""
    return (
        f"The ratios are of {model or SMALL_MODEL},\non {where['gpu'] or where['cpu']}. "
        "The slower a machine computes and the smaller its KV, the larger\nthey are: measure "
        "your own model on your own machine, with bench/ttft.py."
    )


def _median(samples: Sequence[Sample], row: str) -> float:
    return statistics.median(each.ttft_s for each in samples if each.row == row)


def strays(samples: Sequence[Sample]) -> list[str]:
    """Return what did not go where it should have gone: warm rows to the cold row's replica."""
    found = []
    holder = ""
    for each in samples:
        if each.row == "cold":
            holder = each.replica
        elif (each.replica == holder) == (each.row == "other"):
            found.append(f"{ROWS[each.row]}: served by {each.replica}, the prefix was on {holder}")
    return found


def report(arguments: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    settings = {name: getattr(arguments, name) for name in ("model", "tokens", "rounds", "seed")}
    rows = list(dict.fromkeys(each.row for each in samples))
    return {
        "what": "time to first token by tier, real vLLM replicas behind the router",
        "command": "python -m bench.replica.demo "
        + " ".join(f"--{k} {v}" for k, v in settings.items() if v is not None),
        "machine": machine(),
        "median_ttft_s": {row: _median(samples, row) for row in rows},
        "ratio_to_cold": {row: _median(samples, "cold") / _median(samples, row) for row in rows},
        "samples": [asdict(each) for each in samples],
    }
