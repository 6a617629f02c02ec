"""What was measured of prefetch: samples, their medians and what prefetch saves."""

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.replica.intervals import Interval, interval
from bench.replica.prefetch_stage import QUEUE_TOKENS, VARIANTS, Sizes
from bench.ttft import machine

STATES: Final = ("idle", "decoding", "queue")
"""What the replica does when the request comes."""
WITHOUT: Final = "none"
"""The variant that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured answer, and under which conditions."""

    round: int
    replica_is: str
    prefetch: str
    ttft_s: float
    held_s: float
    """Of that: held in the router until the replica could soon begin."""
    read_bytes: int
    """Read from disk meanwhile."""
    looked_up_s: float
    """How long it waited in vLLM for KV on its way to CPU RAM, by vLLM's own clock."""
    in_time: bool
    """Whether all of the prefix was in CPU RAM when the request was forwarded."""
    matched: str
    """What the router knew the replica to hold, and what it had prefetched."""
    before_it_ttft_s: float | None = None
    """TTFT of the prompt whose prefill the request came behind."""


def is_in_time(headers: Mapping[str, str]) -> bool:
    """Whether nothing of a prompt was on disk any more when it was forwarded, by the headers."""
    told = headers.get("x-warmroute-prefetch")
    if told is None:
        return int(headers.get("x-warmroute-matched-disk", 0)) == 0
    counts = dict(each.split("=") for each in told.split(";"))
    return counts["pending"] == counts["missing"] == "0"


def median_s(samples: Sequence[Sample], state: str, variant: str) -> Interval:
    """Return the median TTFT of a state and a variant."""
    return interval(statistics.median, [each.ttft_s for each in _of(samples, state, variant)])


def saved_s(samples: Sequence[Sample], state: str, variant: str) -> Interval:
    """Return the median of what a variant saves, round by round."""
    without = {each.round: each.ttft_s for each in _of(samples, state, WITHOUT)}
    mine = {each.round: each.ttft_s for each in _of(samples, state, variant)}
    pairs = [without[number] - mine[number] for number in sorted(without.keys() & mine.keys())]
    return interval(statistics.median, pairs)


def figures(samples: Sequence[Sample], state: str, variant: str) -> dict[str, Any]:
    """Return every figure of a state and a variant."""
    some = _of(samples, state, variant)
    return {
        "replica_is": state,
        "prefetch": variant,
        "samples": len(some),
        "median_ttft_s": asdict(median_s(samples, state, variant)),
        "median_saved_s": asdict(saved_s(samples, state, variant)),
        "median_held_s": statistics.median(each.held_s for each in some),
        "median_looked_up_s": statistics.median(each.looked_up_s for each in some),
        "in_time_share": statistics.fmean(each.in_time for each in some),
        "median_read_bytes": statistics.median(each.read_bytes for each in some),
        "median_before_it_ttft_s": _median_before(some),
    }


def conditions(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return the states and variants that there are samples of, as pairs."""
    return [each for each in itertools.product(STATES, VARIANTS) if _of(samples, *each)]


def table(samples: Sequence[Sample]) -> str:
    """Return a line for each state and variant: TTFT, what is saved, what was read."""
    header = (
        f"{'replica':<10}{'prefetch':<16}{'TTFT s':>24}{'saved s':>26}"
        f"{'waited s':>10}{'in time':>9}{'MiB':>7}"
    )
    lines = [header, "-" * len(header)]
    for state, variant in conditions(samples):
        told = figures(samples, state, variant)
        saved = "" if variant == WITHOUT else str(saved_s(samples, state, variant))
        lines.append(
            f"{state:<10}{variant:<16}{median_s(samples, state, variant)!s:>24}{saved:>26}"
            f"{told['median_looked_up_s']:>10.3f}{told['in_time_share']:>9.0%}"
            f"{told['median_read_bytes'] / 2**20:>7.0f}"
        )
    return "\n".join(lines)


def report(
    arguments: argparse.Namespace, sizes: Sizes, samples: Sequence[Sample]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    return {
        "what": "time to first token of a prefix on disk alone, with prefetch and without",
        "command": f"python -m bench.replica.prefetch --tokens {arguments.tokens} "
        f"--kv-bytes-per-token {arguments.kv_bytes_per_token} "
        f"--rounds {arguments.rounds} --seed {arguments.seed}",
        "machine": machine(),
        "sizes": asdict(sizes),
        "prefetch_settings": VARIANTS,
        "queue_tokens": QUEUE_TOKENS,
        "figures": [figures(samples, *each) for each in conditions(samples)],
        "samples": [asdict(each) for each in samples],
    }


def _of(samples: Sequence[Sample], state: str, variant: str) -> list[Sample]:
    return [each for each in samples if (each.replica_is, each.prefetch) == (state, variant)]


def _median_before(samples: Sequence[Sample]) -> float | None:
    times_s = [each.before_it_ttft_s for each in samples if each.before_it_ttft_s is not None]
    return statistics.median(times_s) if times_s else None
