"""A replay's table for the terminal, and the requests that cost ours most."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.record import TIERS, Record
from bench.replay.figures import Figures

_COLUMNS: Final = (
    ("TTFT mean", "ttft_mean_s", "s"),
    ("p50", "ttft_p50_s", "s"),
    ("p90", "ttft_p90_s", "s"),
    ("p99", "ttft_p99_s", "s"),
    ("replica's", "replica_ttft_mean_s", "s"),
    ("whole p50", "latency_p50_s", "s"),
    ("p90", "latency_p90_s", "s"),
    ("token ms", "per_token_p50_s", "ms"),
    ("p90", "per_token_p90_s", "ms"),
    ("gpu", "hit_gpu", "%"),
    ("cpu", "hit_cpu", "%"),
    ("disk", "hit_disk", "%"),
    ("spilled", "spilled", "%"),
    ("moved", "moved", "%"),
    ("in time", "prefetch_in_time", "%"),
    ("wasted GB", "prefetch_wasted_bytes", "GB"),
    ("balance", "balance", "x"),
    ("req/s", "requests_per_s", "x"),
    ("load", "load", "x"),
    ("errors", "errors", "n"),
    ("429s", "refused", "n"),
    ("CPU s", "router_cpu_s", "CPU s"),
    ("lag p99", "lag_p99_s", "s"),
)
_UNITS: Final = {
    "s": (1.0, 3),
    "ms": (1000.0, 1),
    "%": (100.0, 1),
    "x": (1.0, 2),
    "GB": (1e-9, 2),
    "CPU s": (1.0, 1),
    "n": (1.0, 0),
}
"""Of a column's values: the factor to what is shown, and the digits."""
_NAME_WIDTH: Final = 26


def table(title: str, results: Sequence[Figures]) -> str:
    """Return a row for each contender. Times in model seconds, hits and shares in percent."""
    lines = [title, " " * _NAME_WIDTH + "".join(f"{name:>10}" for name, _, _ in _COLUMNS)]
    for each in results:
        if each.why_not is not None:
            lines.append(f"{each.contender:<{_NAME_WIDTH}} {each.why_not}")
            continue
        values = asdict(each)
        cells = "".join(f"{_cell(values[key], unit):>10}" for _, key, unit in _COLUMNS)
        lines.append(f"{each.contender:<{_NAME_WIDTH}}{cells}")
    return "\n".join(lines)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    factor, digits = _UNITS[unit]
    return f"{value * factor:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Costly:
    """A request that ours served later than the oracle did. Times in model seconds."""

    number: int
    session: str | None
    turn: int
    prompt_tokens: int
    lost_s: float
    """TTFT of ours less the oracle's."""
    ours: dict[str, Any]
    oracle: dict[str, Any]


def costliest(
    ours: Sequence[Record], oracle: Sequence[Record], count: int, *, speed: float
) -> list[Costly]:
    """Return the requests on which ours lost most to the oracle, with both decisions."""
    theirs = {each.number: each for each in oracle if each.ok}
    pairs = [(each, theirs[each.number]) for each in ours if each.ok and each.number in theirs]
    pairs.sort(key=lambda pair: _lost_s(*pair), reverse=True)
    return [
        Costly(
            number=mine.number,
            session=mine.session,
            turn=mine.turn,
            prompt_tokens=mine.prompt_tokens,
            lost_s=_lost_s(mine, other),
            ours={**_decision(mine), **_told(mine, speed)},
            oracle={**_decision(other), "predicted_ttft_s": other.predicted_ttft_s},
        )
        for mine, other in pairs[:count]
    ]


def _lost_s(mine: Record, other: Record) -> float:
    return (mine.ttft_s or 0.0) - (other.ttft_s or 0.0)


def _decision(record: Record) -> dict[str, Any]:
    return {
        "replica": record.instance_id,
        "ttft_s": record.ttft_s,
        "replica_ttft_s": record.replica_ttft_s,
        "cached_tokens": record.cached_tokens,
    }


def _told(record: Record, speed: float) -> dict[str, Any]:
    """Return the router's own words of its decision, from the answer's headers."""
    headers = record.headers
    matched = {tier: int(headers.get(f"matched-{tier}", 0)) for tier in TIERS}
    predicted_ms = headers.get("predicted-ttft-ms")
    return {
        "reason": headers.get("reason"),
        "matched_tokens": matched,
        "predicted_ttft_s": None if predicted_ms is None else float(predicted_ms) / 1000 * speed,
        "headers": headers,
    }


def costliest_table(requests: Sequence[Costly]) -> str:
    """Return a line for each of the costliest requests."""
    lines = [
        f"{'request':>8}{'tokens':>8}{'lost s':>8}  {'ours: replica, reason':<26}"
        f"{'predicted':>10}{'observed':>9}{'at repl.':>9}  {'matched g/c/d':<20}{'true g/c/d':<20}"
        f"oracle: replica{'predicted':>10}{'observed':>9}  true g/c/d"
    ]
    for each in requests:
        mine, other = each.ours, each.oracle
        lines.append(
            f"{each.number:>8}{each.prompt_tokens:>8}{each.lost_s:>8.2f}  "
            f"{mine['replica']!s:<12}{mine['reason']!s:<14}"
            f"{_seconds(mine['predicted_ttft_s']):>10}{_seconds(mine['ttft_s']):>9}"
            f"{_seconds(mine['replica_ttft_s']):>9}  "
            f"{_by_tier(mine['matched_tokens']):<20}{_by_tier(mine['cached_tokens']):<20}"
            f"{other['replica']!s:<15}{_seconds(other['predicted_ttft_s']):>10}"
            f"{_seconds(other['ttft_s']):>9}  {_by_tier(other['cached_tokens'])}"
        )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _by_tier(tokens: Mapping[str, int]) -> str:
    return "/".join(str(tokens.get(tier, 0)) for tier in TIERS)
