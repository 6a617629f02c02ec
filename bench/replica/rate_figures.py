"""Figures of `bench.replica.rates`: measured rates against an outside clock, drift and growth.

Pure: no I/O and no clock. A ratio is always a measured speed over the speed by the outside clock,
so 1.2 means that the replica says it is 20% faster than it is.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

MOST_OFF: Final = 0.2
"""Share that a measured rate may be off the outside clock, or drift between two quarters."""
MOST_GROWTH: Final = 0.1
"""Share that the computed tokens of requests of equal kind may grow between two quarters."""
QUARTERS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a replica's agent reports of its speed at one time."""

    prefill_token_s: float
    attended_token_s: float
    cpu_bytes_per_s: float
    disk_bytes_per_s: float

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Rates | None":
        """Return the rates in an agent's ``/info``; None while it has not measured all of them."""
        compute, tiers = info["compute"], info["tiers"]
        loaded, read = (tiers[name]["read_bytes_per_s"] for name in ("cpu", "disk"))
        if compute is None or not loaded or not read:
            return None
        return cls(
            prefill_token_s=compute["prefill_token_s"],
            attended_token_s=compute["attended_token_s"],
            cpu_bytes_per_s=loaded,
            disk_bytes_per_s=read,
        )

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Return the seconds that computing ``tokens`` takes after ``context`` cached tokens."""
        attended = tokens * (context + tokens / 2)
        return tokens * self.prefill_token_s + attended * self.attended_token_s


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A replica's rates as its agent and the router reported them at one time."""

    at_s: float
    replica: str
    rates: Rates
    router: Mapping[str, float]
    """``warmroute_measured_rate`` by part, in units per second."""
    memory_bytes_per_s: float
    """At which the machine copied memory at this time, by a copy of the bench's own."""
    disk_bytes_per_s: float | None
    """At which it read files of the replica's disk tier, past the page cache; None: not tried."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a session, by the client's clock."""

    kind: int
    """How many turns its session had before."""
    sent_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    """Whole blocks of the session's previous prompt."""
    replica: str = ""
    held_s: float = 0.0
    predicted_s: float = 0.0
    """The router's prediction of the TTFT; ``held_s`` is not part of it."""
    matched: Mapping[str, int] = field(default_factory=dict)
    """Tokens by tier, as the router believed."""
    is_copied: bool = False
    """Whether KV was copied from the other replica for it."""
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens computed that a replica had computed before for this session."""
        return max(0, self.reusable_tokens - self.cached_tokens)

    def predicted_by(self, rates: Rates, kv_bytes_per_token: int) -> float:
        """Return the seconds that its reads, loads and prefill take at these rates."""
        read_bytes = kv_bytes_per_token * self.matched.get("disk", 0)
        loaded_bytes = read_bytes + kv_bytes_per_token * self.matched.get("cpu", 0)
        return (
            read_bytes / rates.disk_bytes_per_s
            + loaded_bytes / rates.cpu_bytes_per_s
            + rates.prefill_s(self.computed_tokens, self.cached_tokens)
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured speed and the same by the outside clock."""

    what: str
    when: str
    replica: str
    unit: str
    measured: float
    outside: float
    observations: int
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.measured / self.outside)

    @property
    def is_close(self) -> bool:
        """Whether the two differ by at most `MOST_OFF`, whichever is larger."""
        return is_close(self.ratio)


def is_close(ratio: float, most: float = MOST_OFF) -> bool:
    """Whether a ratio is between ``1 / (1 + most)`` and ``1 + most``."""
    return 1 / (1 + most) <= ratio <= 1 + most


def compare_prefill(
    when: str,
    replica: str,
    rates: Rates,
    cold: Sequence[tuple[int, float]],
    *,
    tiny: tuple[int, Sequence[float]],
) -> Comparison:
    """Compare the prefill speed over cold prompts: the tokens and the TTFT of each.

    ``tiny`` is a prompt whose tokens take next to no time: its TTFTs are the base that every
    request has. Sums are compared, since the replica fits its rates to sums: where other work
    slows the machine down now and then, a median would be another figure.
    """
    tiny_tokens, tiny_s = tiny
    base_s = fmean(tiny_s)
    tokens = sum(each - tiny_tokens for each, _ in cold)
    predicted_s = sum(rates.prefill_s(each) - rates.prefill_s(tiny_tokens) for each, _ in cold)
    return Comparison(
        what="prefill of cold prompts",
        when=when,
        replica=replica,
        unit="tokens/s",
        measured=tokens / predicted_s,
        outside=tokens / sum(ttft_s - base_s for _, ttft_s in cold),
        observations=len(cold),
    )


@dataclass(frozen=True, kw_only=True)
class TierTimes:
    """How long one prompt waited until vLLM began to compute it, in several rounds.

    By where its KV was: in CPU RAM, on disk. If it is in the GPU, the prompt does not wait.
    """

    kv_bytes: int
    cpu_s: list[float] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)


def compare_tiers(
    when: str, replica: str, rates: Rates, short: TierTimes, long: TierTimes
) -> list[Comparison]:
    """Compare the speeds of loading from CPU RAM and of reading from disk.

    A load has a wait that does not depend on its size: it is in both prompts' times, and in the
    times from CPU RAM and from disk.
    """
    rounds = len(long.cpu_s)
    loaded_s = fmean(long.cpu_s) - fmean(short.cpu_s)
    read_s = fmean(long.disk_s) - fmean(long.cpu_s)
    return [
        Comparison(
            what=what,
            when=when,
            replica=replica,
            unit="bytes/s",
            measured=measured,
            outside=moved_bytes / max(seconds, 1e-9),
            observations=rounds,
        )
        for what, measured, moved_bytes, seconds in (
            ("load from CPU RAM", rates.cpu_bytes_per_s, long.kv_bytes - short.kv_bytes, loaded_s),
            ("read from disk", rates.disk_bytes_per_s, long.kv_bytes, read_s),
        )
    ]


def alone(turns: Iterable[Turn]) -> list[Turn]:
    """Return the turns that no other request at their replica delayed, and that were not held."""
    by_replica: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        if not turn.failure:
            by_replica[turn.replica].append(turn)
    found = []
    for mine in by_replica.values():
        mine.sort(key=lambda turn: turn.sent_s)
        busy_until_s = 0.0
        for turn, after in zip(mine, [*mine[1:], None], strict=True):
            is_first = turn.sent_s >= busy_until_s
            is_last = after is None or after.sent_s >= turn.first_s
            if is_first and is_last and turn.held_s < 0.01:
                found.append(turn)
            busy_until_s = max(busy_until_s, turn.ended_s)
    return sorted(found, key=lambda turn: turn.sent_s)


def compare_turns(
    when: str,
    turns: Sequence[Turn],
    samples: Sequence[Sample],
    *,
    base_s: float,
    kv_bytes_per_token: int,
) -> list[Comparison]:
    """Compare first tokens of turns that were alone with the rates of that time, per replica.

    ``base_s`` is the TTFT of a tiny prompt. Speeds are computed tokens over the seconds of reads,
    loads and prefill. Turns with KV of the other replica are left out.
    """
    rates_at = _RatesAt(samples)
    by_replica: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for turn in turns:
        rates = rates_at.find(turn.replica, turn.sent_s)
        if not turn.is_copied and rates is not None:
            predicted_s = turn.predicted_by(rates, kv_bytes_per_token)
            observed_s = max(0.0, turn.ttft_s - base_s)
            by_replica[turn.replica].append((predicted_s, observed_s, turn.computed_tokens))
    found = []
    for replica, pairs in sorted(by_replica.items()):
        tokens = sum(each[2] for each in pairs)
        found.append(
            Comparison(
                what="first tokens of turns",
                when=when,
                replica=replica,
                unit="tokens/s",
                measured=tokens / sum(each[0] for each in pairs),
                outside=tokens / sum(each[1] for each in pairs),
                observations=len(pairs),
            )
        )
    return found


class _RatesAt:
    """The last sample of each replica before a time."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for sample in sorted(samples, key=lambda each: each.at_s):
            self._samples[sample.replica].append(sample)

    def find(self, replica: str, at_s: float) -> Rates | None:
        mine = self._samples[replica]
        place = bisect_right(mine, at_s, key=lambda each: each.at_s)
        return mine[place - 1].rates if place else None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure in the first and in the last quarter of the run."""

    what: str
    first: float
    last: float
    outside: float | None = None
    """The same ratio by the outside clock: how much the machine itself changed."""
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.last / self.first)

    @property
    def is_drift(self) -> bool:
        """Whether it changed by more than `MOST_OFF`, and the machine did not as much."""
        if is_close(self.ratio):
            return False
        return not (self.outside and is_close(self.ratio / self.outside))


def quarter_of(at_s: float, run_s: float) -> int:
    """Return the quarter of the run, from 0, that a time after its start is in."""
    return min(QUARTERS - 1, int(QUARTERS * at_s / run_s))


def drift(
    samples: Sequence[Sample],
    run_s: float,
    compared: Sequence[Sequence[Comparison]],
    *,
    tokens: int,
    context: int,
) -> list[Change]:
    """Return how each rate changed, by the medians of the first and the last quarter.

    The rates of computing are those of a prompt of that many tokens after that context.
    ``compared`` has the comparisons of turns in the first and in the last quarter.
    """
    found = []
    for replica in sorted({each.replica for each in samples}):
        mine = sorted(
            (each for each in samples if each.replica == replica), key=lambda each: each.at_s
        )
        first, last = (
            [each for each in mine if quarter_of(each.at_s, run_s) == quarter]
            for quarter in (0, QUARTERS - 1)
        )
        if not (first and last):
            continue
        speeds = {
            "prefill tokens/s": [tokens / each.rates.prefill_s(tokens, context) for each in mine],
            "CPU RAM bytes/s": [each.rates.cpu_bytes_per_s for each in mine],
            "disk bytes/s": [each.rates.disk_bytes_per_s for each in mine],
        }
        outside = {
            "prefill tokens/s": _honesty(replica, compared),
            "CPU RAM bytes/s": _change(
                [e.memory_bytes_per_s for e in first], [e.memory_bytes_per_s for e in last]
            ),
            "disk bytes/s": _change(
                [e.disk_bytes_per_s for e in first if e.disk_bytes_per_s],
                [e.disk_bytes_per_s for e in last if e.disk_bytes_per_s],
            ),
        }
        for what, values in speeds.items():
            before, after = median(values[: len(first)]), median(values[-len(last) :])
            known = outside[what]
            if what == "prefill tokens/s" and known is not None:
                known = after / before / known
            found.append(Change(what=f"{replica}: {what}", first=before, last=after, outside=known))
    return found


def _change(first: Sequence[float], last: Sequence[float]) -> float | None:
    return median(last) / median(first) if first and last else None


def _honesty(replica: str, compared: Sequence[Sequence[Comparison]]) -> float | None:
    """Return how the ratio of measured to outside speed changed; None if one is not known."""
    ratios = [each.ratio for part in compared for each in part if each.replica == replica]
    return ratios[1] / ratios[0] if len(ratios) == len(compared) == 2 else None


def growth(turns: Sequence[Turn], run_s: float) -> list[Change]:
    """Return how the computed tokens of a request changed, for each kind and for all together.

    The last entry weights each kind with its share of the whole run, so that another mix of
    kinds is not a growth. Kinds that one of the two quarters lacks are left out.
    """
    computed: dict[int, list[list[int]]] = defaultdict(lambda: [[] for _ in range(QUARTERS)])
    for turn in turns:
        if not turn.failure:
            computed[turn.kind][quarter_of(turn.sent_s, run_s)].append(turn.computed_tokens)
    found, weights = [], []
    for kind, quarters in sorted(computed.items()):
        if quarters[0] and quarters[-1]:
            found.append(
                Change(what=f"turn {kind}", first=fmean(quarters[0]), last=fmean(quarters[-1]))
            )
            weights.append(sum(map(len, quarters)))
    if found:
        first, last = (
            fmean([getattr(each, name) for each in found], weights) for name in ("first", "last")
        )
        found.append(Change(what="all turns", first=first, last=last))
    return found


def by_minute(
    turns: Sequence[Turn], samples: Sequence[Sample], run_s: float, *, tokens: int, context: int
) -> list[dict[str, Any]]:
    """Return the run minute by minute: requests, tokens, TTFT, and each replica's rates."""
    minutes = []
    for minute in range(max(1, round(run_s / 60))):
        began_s, ended_s = 60.0 * minute, 60.0 * (minute + 1)
        mine = [each for each in turns if began_s <= each.sent_s < ended_s and not each.failure]
        later = [each for each in mine if each.kind]
        ttft_s = sorted(each.ttft_s for each in mine)
        rates = {}
        for replica in sorted({each.replica for each in samples}):
            seen = [
                each
                for each in samples
                if each.replica == replica and began_s <= each.at_s < ended_s
            ]
            if seen:
                rates[replica] = {
                    "prefill_tokens_per_s": median(
                        tokens / each.rates.prefill_s(tokens, context) for each in seen
                    ),
                    "cpu_bytes_per_s": median(each.rates.cpu_bytes_per_s for each in seen),
                    "disk_bytes_per_s": median(each.rates.disk_bytes_per_s for each in seen),
                }
        minutes.append(
            {
                "minute": minute,
                "requests": len(mine),
                "computed_tokens_of_first_turns": _mean(
                    [each.computed_tokens for each in mine if not each.kind]
                ),
                "computed_tokens_of_later_turns": _mean([e.computed_tokens for e in later]),
                "lost_tokens_of_later_turns": _mean([each.lost_tokens for each in later]),
                "ttft_p50_s": median(ttft_s) if ttft_s else None,
                "ttft_p90_s": ttft_s[int(0.9 * (len(ttft_s) - 1))] if ttft_s else None,
                "rates": rates,
            }
        )
    return minutes


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def router_ratios(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the median of the router's rate over the agent's, for each rate it takes over."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        own = {
            "prefill": 1 / sample.rates.prefill_token_s if sample.rates.prefill_token_s else 0.0,
            "attention": 1 / sample.rates.attended_token_s if sample.rates.attended_token_s else 0,
            "load": sample.rates.cpu_bytes_per_s,
            "disk": sample.rates.disk_bytes_per_s,
        }
        for part, per_second in own.items():
            if per_second and part in sample.router:
                ratios[part].append(sample.router[part] / per_second)
    return {part: median(values) for part, values in ratios.items()}


def faults(
    compared: Iterable[Comparison],
    drifted: Iterable[Change],
    grown: Sequence[Change],
    failures: int,
) -> list[str]:
    """Return what does not hold; empty if everything does."""
    found = [
        f"{each.what}, {each.when}, {each.replica}: measured {each.measured:,.0f} {each.unit}, "
        f"outside clock {each.outside:,.0f} (ratio {each.ratio:.2f})"
        for each in compared
        if not each.is_close
    ]
    found += [
        f"{each.what}: {each.first:,.0f} in the first quarter, {each.last:,.0f} in the last "
        f"(ratio {each.ratio:.2f})"
        for each in drifted
        if each.is_drift
    ]
    if not grown:
        found.append("computed tokens: too few requests to compare quarters")
    elif grown[-1].ratio > 1 + MOST_GROWTH:
        found.append(
            f"computed tokens of a request: {grown[-1].first:.0f} in the first quarter, "
            f"{grown[-1].last:.0f} in the last (ratio {grown[-1].ratio:.2f})"
        )
    if failures:
        found.append(f"{failures} requests failed")
    return found
