"""The figures of one contender, from the records of its requests. Times in model seconds."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.record import TIERS, Record
from bench.ttft import percentile
from router.fleet.decision import Reason

KV_BYTES_PER_TOKEN: Final = 100_000
"""The simulated chunks hold few bytes; what moves is told as if a token's KV were so large."""

_TOO_MANY: Final = 429
_COUNT: Final = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender against one workload; None where there is nothing to tell."""

    contender: str
    why_not: str | None = None
    """Why it did not run; then nothing else is told."""
    requests: int = 0
    errors: int = 0
    """Requests without a whole answer, those refused among them."""
    refused: int = 0
    """Requests that were answered with 429."""
    first_error: str | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    replica_ttft_mean_s: float | None = None
    """The part of it at the replica; the rest are the router, the client and the way."""
    latency_p50_s: float | None = None
    """To the end of the answer."""
    latency_p90_s: float | None = None
    per_token_p50_s: float | None = None
    """Time per output token after the first, each answer's mean."""
    per_token_p90_s: float | None = None
    hit_gpu: float | None = None
    """Share of all prompt tokens that were found there."""
    hit_cpu: float | None = None
    hit_disk: float | None = None
    spilled: float | None = None
    """Share of later turns that the router says left their home (ours alone tells)."""
    moved: float | None = None
    """Share of later turns served by another replica than the turn before."""
    prefetch_asked_chunks: int | None = None
    prefetch_in_time: float | None = None
    """Share of the chunks asked for that were promoted when the request went on."""
    prefetch_wasted_bytes: float | None = None
    """KV promoted for nobody, by any contender, at `KV_BYTES_PER_TOKEN`."""
    balance: float | None = None
    """Tokens computed by the busiest replica over their mean."""
    requests_per_s: float | None = None
    router_cpu_s: float | None = None
    """In seconds of the clock, not the model's."""
    lag_p99_s: float | None = None
    """How late the client sent: a large one means that this machine was too slow."""
    load: float | None = None
    """What came, as a share of what the fleet prefills: all prompt tokens, none cached."""


def figures(
    contender: str,
    records: Sequence[Record],
    *,
    replicas: int,
    fleet_tokens_per_s: float,
    router_cpu_s: float | None = None,
    truth: Sequence[Mapping[str, Any]] = (),
) -> Figures:
    """Return the figures of a run; ``truth`` is what the fleet tells of each replica at its end."""
    done = [each for each in records if each.ok]
    ttfts = [each.ttft_s for each in done if each.ttft_s is not None]
    latencies = [each.total_s for each in done if each.total_s is not None]
    per_token = [each.per_token_s for each in done if each.per_token_s is not None]
    known = [each for each in done if each.cached_tokens]
    prompt_tokens = sum(each.prompt_tokens for each in known)
    hits = {tier: sum(each.cached_tokens[tier] for each in known) for tier in TIERS}
    at_replica = [each.replica_ttft_s for each in known if each.replica_ttft_s is not None]
    asked, promoted = _prefetched(records)
    length_s = max((each.sent_s + (each.total_s or 0.0) for each in records), default=0.0)
    sending_s = max((each.sent_s for each in records), default=0.0)
    offered = sum(each.prompt_tokens for each in records)
    first_s = min((each.sent_s for each in records), default=0.0)
    return Figures(
        contender=contender,
        requests=len(records),
        errors=len(records) - len(done),
        refused=sum(each.status == _TOO_MANY for each in records),
        first_error=next((each.error for each in records if not each.ok), None),
        ttft_mean_s=statistics.fmean(ttfts) if ttfts else None,
        ttft_p50_s=_at(0.5, ttfts),
        ttft_p90_s=_at(0.9, ttfts),
        ttft_p99_s=_at(0.99, ttfts),
        replica_ttft_mean_s=statistics.fmean(at_replica) if at_replica else None,
        latency_p50_s=_at(0.5, latencies),
        latency_p90_s=_at(0.9, latencies),
        per_token_p50_s=_at(0.5, per_token),
        per_token_p90_s=_at(0.9, per_token),
        hit_gpu=_share(hits["gpu"], prompt_tokens),
        hit_cpu=_share(hits["cpu"], prompt_tokens),
        hit_disk=_share(hits["disk"], prompt_tokens),
        spilled=_spilled(records),
        moved=_moved(records),
        prefetch_asked_chunks=asked or None,
        prefetch_in_time=_share(promoted, asked),
        prefetch_wasted_bytes=_wasted_bytes(truth) if asked else None,
        balance=_balance(known, replicas),
        requests_per_s=_share(len(done), length_s - first_s),
        router_cpu_s=router_cpu_s,
        lag_p99_s=_at(0.99, [each.sent_s - each.due_s for each in records]),
        load=_share(offered / fleet_tokens_per_s, sending_s - first_s),
    )


def _at(fraction: float, values: Sequence[float]) -> float | None:
    return percentile(values, fraction) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _prefetched(records: Iterable[Record]) -> tuple[int, int]:
    """Return the chunks that the router asked for, and those that came in time."""
    asked = promoted = 0
    for each in records:
        counts = dict(_COUNT.findall(each.headers.get("prefetch", "")))
        asked += int(counts.get("asked", 0))
        promoted += int(counts.get("promoted", 0))
    return asked, promoted


def _wasted_bytes(truth: Iterable[Mapping[str, Any]]) -> float:
    tokens = sum(each["prefetch_unused_bytes"] / each["bytes_per_token"] for each in truth)
    return float(tokens * KV_BYTES_PER_TOKEN)


def _later_turns(records: Iterable[Record]) -> list[Record]:
    return [each for each in records if each.session is not None and each.turn > 0]


def _spilled(records: Iterable[Record]) -> float | None:
    told = [each for each in _later_turns(records) if "reason" in each.headers]
    return _share(sum(each.headers["reason"] == Reason.SESSION_SPILL for each in told), len(told))


def _moved(records: Sequence[Record]) -> float | None:
    places: dict[tuple[str | None, int], str | None] = {
        (each.session, each.turn): each.instance_id for each in records
    }
    later = [each for each in _later_turns(records) if each.instance_id is not None]
    moved = sum(places.get((each.session, each.turn - 1)) != each.instance_id for each in later)
    return _share(moved, len(later))


def _balance(records: Iterable[Record], replicas: int) -> float | None:
    computed: dict[str, int] = defaultdict(int)
    for each in records:
        if each.instance_id is not None:
            computed[each.instance_id] += each.computed_tokens
    total = sum(computed.values())
    return max(computed.values()) * replicas / total if total else None
