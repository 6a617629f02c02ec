"""The figures of one run, from the records of its requests. Pure; times in model seconds.

Reported are the same requests for every contender: those that an ideal fleet has due after
the warm-up (`bench.workloads.offered`), whenever this one had them due. Were they chosen by
the contender's own times, one that answers late would be asked less and would report less.

A request that failed, by an error or by a 429, counts as one whose first token never came,
and so does one that was never sent as a turn before it failed: it is in every quantile as
an infinite time, and no bound is met by it. Means are over answered requests, and are to be
read beside the failures.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.record import TIERS, Record
from bench.ttft import BenchError, percentile
from router.fleet.decision import Reason

REFUSED: Final = 429
"""The status of a request that the router would not hold any longer."""
_NOT_SENT: Final = "not sent"
"""How the driver's error begins of a request whose session had ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time from the end of the warm-up until sessions stop starting."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.until_s - self.from_s

    def of(self, records: Iterable[Record]) -> list[Record]:
        """Return the records of the requests that were due in it."""
        return [each for each in records if self.from_s <= each.due_s < self.until_s]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender, one workload, one seed. A quantile of None is infinite: so many failed."""

    requests: int
    """Reported ones."""
    errors: int
    """Requests that were not answered whole, the refused and the unsent ones included."""
    refused: int
    unsent: int
    """Requests whose session had ended in an error before."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    total_p50_s: float | None
    """From sending a request to the end of its answer."""
    total_p90_s: float | None
    output_token_mean_s: float | None
    """Time for each token of an answer after the first; None: no answer had two."""
    output_token_p90_s: float | None
    met: dict[str, float]
    """By a bound in seconds (`bound_key`): share of requests whose TTFT is within it."""
    hits: dict[str, float]
    """By tier: share of the answered prompts' tokens that were found there."""
    computed_tokens: int
    """Prompt tokens of answered requests that were in no tier of their replica."""
    moved: float | None
    """Share of later turns served by another replica than the turn before."""
    spilled: float | None
    """Share of later turns that the router says left their home (ours alone tells)."""
    balance: float | None
    """Tokens computed by the busiest replica over the mean of all."""
    played_load: float
    """All prompt tokens that were sent in the window over what the fleet prefills in it.

    A contender that answers late is asked less: sessions wait for their answers.
    """
    counts: dict[str, float]
    """What the driver counted over the whole run, warm-up included, such as wasted prefetch."""


def bound_key(bound_s: float) -> str:
    """Return the name of a TTFT bound in `Figures.met`."""
    return f"{bound_s:g}"


def figures(
    records: Sequence[Record],
    *,
    reported: Sequence[int],
    window: Window,
    replicas: int,
    fleet_tokens_per_s: float,
    bounds_s: Iterable[float],
    counts: Mapping[str, float],
) -> Figures:
    """Return the figures of a run, of the requests with the ``reported`` numbers.

    Raises `BenchError` where there are none of them.
    """
    if not reported:
        raise BenchError("the workload has no request to report: its window is empty")
    told = chosen(records, reported)
    done = [each for each in told if answered(each)]
    missing = len(reported) - len(told)
    ttfts = [*map(ttft_s, told), *[math.inf] * missing]
    totals = [*map(_total_s, told), *[math.inf] * missing]
    token_times = [each for record in done if (each := _output_token_s(record)) is not None]
    return Figures(
        requests=len(reported),
        errors=len(reported) - len(done),
        refused=sum(each.status == REFUSED for each in told),
        unsent=missing + sum((each.error or "").startswith(_NOT_SENT) for each in told),
        ttft_mean_s=_mean([ttft_s(each) for each in done]),
        ttft_p50_s=_quantile(ttfts, 0.5),
        ttft_p90_s=_quantile(ttfts, 0.9),
        ttft_p99_s=_quantile(ttfts, 0.99),
        total_p50_s=_quantile(totals, 0.5),
        total_p90_s=_quantile(totals, 0.9),
        output_token_mean_s=_mean(token_times),
        output_token_p90_s=_quantile(token_times, 0.9),
        met={bound_key(each): _share_within(ttfts, each) for each in bounds_s},
        hits=_hits(done),
        computed_tokens=sum(each.computed_tokens for each in done),
        moved=_moved(told, records),
        spilled=_spilled(told),
        balance=_balance(done, replicas),
        played_load=sum(each.prompt_tokens for each in window.of(records))
        / (fleet_tokens_per_s * window.length_s),
        counts=dict(counts),
    )


def chosen(records: Iterable[Record], reported: Iterable[int]) -> list[Record]:
    """Return the records with these numbers, as far as they were sent."""
    wanted = frozenset(reported)
    return [each for each in records if each.number in wanted]


def answered(record: Record) -> bool:
    """Whether a request was answered whole; a refusal is none."""
    return record.ok and (record.status or 200) < 400


def ttft_s(record: Record) -> float:
    """Return a request's time to first token; infinite where it failed."""
    return record.ttft_s if answered(record) and record.ttft_s is not None else math.inf


def _total_s(record: Record) -> float:
    return record.total_s if answered(record) and record.total_s is not None else math.inf


def _output_token_s(record: Record) -> float | None:
    if record.output_tokens < 2 or record.ttft_s is None or record.total_s is None:
        return None
    return (record.total_s - record.ttft_s) / (record.output_tokens - 1)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    found = percentile(values, share)
    return found if math.isfinite(found) else None


def _share_within(ttfts: Sequence[float], bound_s: float) -> float:
    return sum(each <= bound_s for each in ttfts) / len(ttfts)


def _hits(done: Iterable[Record]) -> dict[str, float]:
    known = [each for each in done if each.cached_tokens]
    tokens = sum(each.prompt_tokens for each in known)
    found = {tier: sum(each.cached_tokens.get(tier, 0) for each in known) for tier in TIERS}
    return {tier: found[tier] / tokens if tokens else 0.0 for tier in TIERS}


def _moved(told: Iterable[Record], records: Iterable[Record]) -> float | None:
    """Compare with the turn before, which may lie before the window."""
    places = {each.number: each.instance_id for each in records}
    later = [each for each in told if each.turn > 0 and each.instance_id is not None]
    moved = sum(places.get(each.number - 1) != each.instance_id for each in later)
    return moved / len(later) if later else None


def _spilled(told: Iterable[Record]) -> float | None:
    later = [each for each in told if each.turn > 0 and "reason" in each.headers]
    spilled = sum(each.headers["reason"] == Reason.SESSION_SPILL for each in later)
    return spilled / len(later) if later else None


def _balance(done: Iterable[Record], replicas: int) -> float | None:
    computed: dict[str, int] = defaultdict(int)
    for each in done:
        if each.instance_id is not None:
            computed[each.instance_id] += each.computed_tokens
    total = sum(computed.values())
    return max(computed.values()) * replicas / total if total else None
