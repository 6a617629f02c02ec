"""Usage by key and model, since the start and today: a reader of `RequestRecord`.

`UsageTotals` is what ``GET /usage`` shows. Its metrics are made from the same numbers.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from router.record.records import Outcome, RequestRecord

_DAY_S: Final = 86_400
_MOST_MODELS: Final = 64
"""Models that are counted by name; further ones count together."""
_NONE: Final = "none"
_OTHER: Final = "other"
_WHOLE: Final = (Outcome.OK, Outcome.ENDED)
_KINDS: Final = ("input", "output", "cached", "computed")
_TOKENS: Final = (
    "Tokens by key and model: input (prompts), output (answers), and of input the cached and the "
    "computed ones, as replicas' usage said; what they did not say is in neither"
)


@dataclass(slots=True, kw_only=True)
class UsageCounts:
    """What was used; tokens as `UsageTotals.observe` counts them."""

    requests: int = 0
    failed_requests: int = 0
    """Requests that got an error or no whole answer."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    ttft_count: int = 0
    ttft_sum_s: float = 0.0
    tpot_count: int = 0
    tpot_sum_s: float = 0.0

    def since(self, before: "UsageCounts") -> "UsageCounts":
        """Return what was used in addition to an earlier count."""
        return UsageCounts(
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTED}
        )

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        is_answered = _is_answered(record)
        self.requests += 1
        self.failed_requests += not (is_answered and record.outcome in _WHOLE)
        tokens = record.input_tokens
        if tokens is None:
            tokens = (record.prompt_tokens or 0) if is_answered else 0
        self.input_tokens += tokens
        if record.cached_tokens is not None:
            self.cached_tokens += record.cached_tokens
            self.computed_tokens += max(0, tokens - record.cached_tokens)
        if not is_answered:
            return
        self.output_tokens += record.answer_tokens or 0
        if (ttft_s := record.ttft_s) is not None:
            self.ttft_count += 1
            self.ttft_sum_s += ttft_s
        if (tpot_s := record.tpot_s) is not None:
            self.tpot_count += 1
            self.tpot_sum_s += tpot_s

    def shown(self) -> dict[str, Any]:
        """Return them for JSON, with means instead of sums."""
        return {
            "requests": self.requests,
            "failed_requests": self.failed_requests,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "mean_ttft_s": _mean(self.ttft_sum_s, self.ttft_count),
            "mean_tpot_s": _mean(self.tpot_sum_s, self.tpot_count),
        }


_COUNTED: Final = tuple(each.name for each in fields(UsageCounts))


def _mean(total_s: float, count: int) -> float | None:
    return round(total_s / count, 6) if count else None


@dataclass(slots=True)
class _Entry:
    """The usage of one model by one key."""

    counts: UsageCounts
    """Since the start."""
    before_day: UsageCounts
    """These as they were when ``day`` began."""
    day: int

    def begin(self, day: int) -> None:
        """Begin another day."""
        self.before_day, self.day = replace(self.counts), day


class UsageTotals(Collector):
    """Counts what was used by key and model; its size is bounded by the configured keys."""

    def __init__(self, utc_clock: Callable[[], float] = time.time) -> None:
        """``utc_clock`` returns the seconds since 1970."""
        self._utc_clock = utc_clock
        self._since_s = utc_clock()
        self._entries: dict[tuple[str | None, str | None], _Entry] = {}
        self._models: set[str] = set()

    def __len__(self) -> int:
        """How many pairs of key and model are counted."""
        return len(self._entries)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        Its tokens are those of the replica's ``usage``. If an answer has none, its prompt is
        counted as the router has tokenized it, and its output by the events of its stream.
        """
        day = int(self._utc_clock() // _DAY_S)
        key = (record.key, self.model_of(record))
        if (entry := self._entries.get(key)) is None:
            entry = self._entries[key] = _Entry(UsageCounts(), UsageCounts(), day)
        if entry.day != day:
            entry.begin(day)
        entry.counts.add(record)

    def model_of(self, record: RequestRecord) -> str | None:
        """Return the name under which a request's model is counted.

        Clients may write any name: it counts once a replica has answered for it.
        """
        model = record.model
        if model is None or model in self._models:
            return model
        if not _is_answered(record) or len(self._models) >= _MOST_MODELS:
            return _OTHER
        self._models.add(model)
        return model

    def shown(self, key: str | None = None) -> dict[str, Any]:
        """Return what each key, or only this one, has used, for JSON."""
        now_s = self._utc_clock()
        for each in self._entries.values():
            if each.day != (day := int(now_s // _DAY_S)):
                each.begin(day)
        return {
            "since": _iso(self._since_s),
            "day": _iso(now_s)[:10],
            "usage": [
                {
                    "key": name,
                    "model": model,
                    "today": each.counts.since(each.before_day).shown(),
                    "since_start": each.counts.shown(),
                }
                for (name, model), each in sorted(self._entries.items(), key=_by_names)
                if key is None or name == key
            ],
        }

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, by key and model."""
        labels = ["key", "model"]
        requests = CounterMetricFamily(
            "warmroute_usage_requests", "Requests by key and model", labels=labels
        )
        tokens = CounterMetricFamily("warmroute_usage_tokens", _TOKENS, labels=[*labels, "kind"])
        ttft = SummaryMetricFamily(
            "warmroute_usage_ttft_seconds", "TTFT of answers by key and model", labels=labels
        )
        tpot = SummaryMetricFamily(
            "warmroute_usage_tpot_seconds",
            "TPOT of streamed answers by key and model",
            labels=labels,
        )
        for (key, model), entry in self._entries.items():
            used, named = entry.counts, [key or _NONE, model or _NONE]
            requests.add_metric(named, used.requests)
            for kind in _KINDS:
                tokens.add_metric([*named, kind], getattr(used, f"{kind}_tokens"))
            ttft.add_metric(named, used.ttft_count, used.ttft_sum_s)
            tpot.add_metric(named, used.tpot_count, used.tpot_sum_s)
        return [requests, tokens, ttft, tpot]


def _is_answered(record: RequestRecord) -> bool:
    """Whether a replica has begun to answer, and not with an error."""
    return record.first_byte_s is not None and record.status is not None and record.status < 400


def _by_names(item: tuple[tuple[str | None, str | None], _Entry]) -> tuple[str, str]:
    (key, model), _ = item
    return (key or "", model or "")


def _iso(utc_s: float) -> str:
    return datetime.fromtimestamp(utc_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
