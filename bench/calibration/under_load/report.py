"""The fleets side by side: TTFTs, where prompts' beginnings were found, what was evicted."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.calibration.report import TOLERANCE
from bench.calibration.under_load.stage import Played
from bench.calibration.under_load.workload import Offered
from bench.proof.statistics import Clustered, Estimate, ratio, within_seed
from bench.record import Record
from bench.ttft import percentile

SHARES: Final = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}
COMPARED: Final = ("p50", "p90")
"""The quantiles that are to be within the tolerance."""
PLACES: Final = ("cold", "gpu", "cpu", "disk")
_DRAWS_SEED: Final = 1


@dataclass(frozen=True, kw_only=True)
class Seed:
    """One workload, and what became of it at the real fleet and at the simulated ones."""

    seed: int
    offered: Offered
    played: Mapping[str, Played]
    """By the fleet's name, `REAL` first."""


REAL: Final = "real"


def reported(seed: Seed, fleet: str) -> list[Record]:
    """Return the answered requests of a fleet that are compared."""
    records = seed.played[fleet].records
    return [each for each in records if each.number in seed.offered.reported and each.ok]


def ttfts_s(seed: Seed, fleet: str) -> list[float]:
    """Return the TTFTs of those."""
    return [each.ttft_s for each in reported(seed, fleet) if each.ttft_s is not None]


def place_of(record: Record) -> str:
    """Return the slowest tier that the router knew a part of the prompt to be in.

    "cold" where it knew of less than half of the prompt.
    """
    held = {tier: int(record.headers.get(f"matched-{tier}", 0)) for tier in PLACES[1:]}
    if 2 * sum(held.values()) < record.prompt_tokens:
        return "cold"
    return next(tier for tier in reversed(PLACES) if held.get(tier))


def quantiles_s(times_s: Sequence[float]) -> dict[str, float]:
    """Return the quantiles of TTFTs that are told, by name."""
    return {name: percentile(times_s, share) for name, share in SHARES.items()}


def ratio_of(seeds: Sequence[Seed], fleet: str, share: float) -> Estimate | None:
    """Return simulated over real TTFT at a quantile, over the seeds."""
    mine, real = (
        [percentile(ttfts_s(each, name), share) for each in seeds] for name in (fleet, REAL)
    )
    return ratio(mine, real)


def is_close(seeds: Sequence[Seed], fleet: str) -> bool:
    """Whether all compared quantiles are within the tolerance of the real ones."""
    found = [ratio_of(seeds, fleet, SHARES[name]) for name in COMPARED]
    return all(each is not None and abs(each.value - 1) <= TOLERANCE for each in found)


def as_json(seeds: Sequence[Seed]) -> dict[str, Any]:
    """Return every figure of every seed, and the ratios over all."""
    fleets = list(seeds[0].played)
    return {
        "tolerance": TOLERANCE,
        "ttft_ratio_to_real": {
            fleet: {
                name: _estimate(ratio_of(seeds, fleet, share)) for name, share in SHARES.items()
            }
            for fleet in fleets[1:]
        },
        "within_tolerance": {fleet: is_close(seeds, fleet) for fleet in fleets[1:]},
        "seeds": [_seed_as_json(each) for each in seeds],
    }


def table(seeds: Sequence[Seed]) -> str:
    """Return the figures for a person: each seed's fleets, then the ratios."""
    lines = []
    for each in seeds:
        offered = each.offered
        lines += [
            "",
            f"seed {each.seed}: real load {offered.real_load:.2f}, without a cache "
            f"{offered.raw_load:.2f}; {len(offered.reported)} requests",
            _HEADER,
        ]
        lines += [_line(each, fleet) for fleet in each.played]
    for fleet in list(seeds[0].played)[1:]:
        lines.append("")
        for name, share in SHARES.items():
            found = ratio_of(seeds, fleet, share)
            lines.append(f"{fleet}/real TTFT {name}: {_shown(found)}")
        lines.append(
            f"{fleet}: {'' if is_close(seeds, fleet) else 'not '}within {TOLERANCE:.0%} at "
            f"{' and '.join(COMPARED)}"
        )
    return "\n".join(lines)


_HEADER: Final = (
    f"{'fleet':<10}{'TTFT p50':>9}{'p90':>8}{'p99':>8}{'mean':>8}{'failed':>7}"
    f"{'hits gpu':>10}{'cpu':>9}{'disk':>9}{'evicted gpu':>13}{'cpu':>7}{'disk':>6}"
)


def _line(seed: Seed, fleet: str) -> str:
    told = _fleet_figures(seed, fleet)
    ttft, hits, gone = told["ttft_s"], told["hit_tokens"], told["evicted"]
    return (
        f"{fleet:<10}{ttft['p50']:>9.3f}{ttft['p90']:>8.3f}{ttft['p99']:>8.3f}{ttft['mean']:>8.3f}"
        f"{told['failed']:>7}{hits['gpu']:>10.0f}{hits['cpu']:>9.0f}{hits['disk']:>9.0f}"
        f"{gone['gpu_blocks'] or 0:>13}{gone['cpu_chunks']:>7.0f}{gone['disk_chunks']:>6.0f}"
    )


def _seed_as_json(seed: Seed) -> dict[str, Any]:
    offered, fleets = seed.offered, list(seed.played)
    return {
        "seed": seed.seed,
        "real_load": offered.real_load,
        "raw_load": offered.raw_load,
        "sessions": len(offered.sessions),
        "requests": len(offered.reported),
        "fleets": {fleet: _fleet_figures(seed, fleet) for fleet in fleets},
        "ttft_ratio_to_real": {
            fleet: {name: _within(seed, fleet, share) for name, share in SHARES.items()}
            for fleet in fleets[1:]
        },
    }


def _fleet_figures(seed: Seed, fleet: str) -> dict[str, Any]:
    played, records, times_s = seed.played[fleet], reported(seed, fleet), ttfts_s(seed, fleet)
    counts = played.counts
    return {
        "answered": len(records),
        "failed": sum(not each.ok for each in played.records),
        "ttft_s": {
            **quantiles_s(times_s),
            "mean": statistics.fmean(times_s),
        },
        "by_place": {place: _place_figures(records, place) for place in PLACES},
        "cached_tokens": sum(sum(each.cached_tokens.values()) for each in records),
        "computed_tokens": sum(each.computed_tokens for each in records),
        "hit_tokens": {
            "gpu": counts.gpu_hit_tokens,
            "cpu": counts.cpu_hit_tokens,
            "disk": counts.disk_hit_tokens,
        },
        "evicted": {
            "gpu_blocks": played.gpu_evicted_blocks,
            "cpu_chunks": counts.cpu_evicted_chunks,
            "disk_chunks": counts.disk_evicted_chunks,
        },
        "counts": asdict(counts),
        "machine_idle_share": played.idle_share,
    }


def _place_figures(records: Sequence[Record], place: str) -> dict[str, Any]:
    """Return how many requests found their prompt in a place, and what they took."""
    some = [each for each in records if place_of(each) == place]
    if not some:
        return {"requests": 0}
    held_s = [float(each.headers.get("held-ms", 0)) / 1000 for each in some]
    times_s = [each.ttft_s or 0.0 for each in some]
    after_s = [ttft - held for ttft, held in zip(times_s, held_s, strict=True)]
    return {
        "requests": len(some),
        "ttft_p50_s": percentile(times_s, 0.5),
        "ttft_p90_s": percentile(times_s, 0.9),
        "held_mean_s": statistics.fmean(held_s),
        "after_holding_p50_s": percentile(after_s, 0.5),
        "after_holding_mean_s": statistics.fmean(after_s),
        "computed_tokens_mean": statistics.fmean(each.computed_tokens for each in some),
    }


def _within(seed: Seed, fleet: str, share: float) -> dict[str, float | None] | None:
    """Return the ratio of one seed, its interval by drawing sessions."""
    mine, real = (
        Clustered(values=ttfts_s(seed, name), clusters=_sessions(seed, name))
        for name in (fleet, REAL)
    )
    return _estimate(within_seed(mine, real, share=share, seed=_DRAWS_SEED))


def _sessions(seed: Seed, fleet: str) -> list[int]:
    return [int(str(each.session).rpartition("-")[2]) for each in reported(seed, fleet)]


def _estimate(found: Estimate | None) -> dict[str, float | None] | None:
    """Return an estimate for JSON, which knows no infinity: a single seed has no interval."""
    if found is None:
        return None
    if math.isinf(found.high):
        return {"value": found.value, "low": None, "high": None, "seeds": found.seeds}
    return asdict(found)


def _shown(found: Estimate | None) -> str:
    if found is None:
        return "none"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f}, {found.seeds} seeds)"
