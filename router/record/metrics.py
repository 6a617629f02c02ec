"""Prometheus metrics: a reader of `RequestRecord`, and gauges read when scraped."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.latency import ErrorFigures, Quantiles
from router.record.records import RequestRecord
from router.staging import Preparation

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_OVERHEAD_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_NO_REPLICA: Final = "none"
_BY_RESULT: Final = ("replica", "result")
"""Results are those of `router.staging.prefetch.Timing`: in-time, late, failed."""


@dataclass(frozen=True, kw_only=True)
class ReplicaGauges:
    """A replica's state now, as `Metrics` shows it."""

    replica_id: str
    state: str
    is_up: bool
    in_flight: int
    errors: ErrorFigures | None = None
    """Of its predicted TTFTs; None before the first streamed answer."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learned rates: units per second by the name of their part."""


class Metrics:
    """All of the router's metrics, in a registry of their own."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[ReplicaGauges]],
        sizes: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """``sizes`` tells how many entries each bounded table holds, by its name."""
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(replicas, sizes))
        self._requests = self._counter(
            "requests", "Requests by how they ended", ["endpoint", "replica", "status", "outcome"]
        )
        self._decisions = self._counter("decisions", "Why a replica was chosen", ["reason"])
        self._failed_tries = self._counter(
            "failed_tries", "Tries at a replica that another had to make good", ["replica", "cause"]
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens in prompts", ["replica"])
        self._matched_tokens = self._counter(
            "matched_tokens",
            "Prompt tokens that the router believed to be cached, by tier",
            ["replica", "tier"],
        )
        self._cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that replicas said were cached", ["replica"]
        )
        self._response_bytes = self._counter(
            "response_bytes", "Bytes of bodies passed on to clients", ["replica"]
        )
        self._ttft = self._histogram(
            "ttft_seconds",
            "From accepting a request to its first byte (not streamed: to the headers)",
            ["replica", "streamed"],
            _TTFT_BUCKETS_S,
        )
        self._duration = self._histogram(
            "request_seconds", "From accepting a request to its end", ["replica"], _TTFT_BUCKETS_S
        )
        self._read = self._histogram(
            "read_prompt_seconds", "Template and tokens", [], _OVERHEAD_BUCKETS_S
        )
        self._place = self._histogram(
            "place_seconds", "Keys, match and costs", [], _OVERHEAD_BUCKETS_S
        )
        self._admission_wait = self._histogram(
            "admission_wait_seconds",
            "How long requests were held until a replica could soon begin with them",
            [],
            _TTFT_BUCKETS_S,
        )
        self._rejected = self._counter(
            "admission_rejected", "Requests answered with 429, by why", ["cause"]
        )
        self._prefetch_wait = self._histogram(
            "prefetch_wait_seconds",
            "How long requests were held back for their prefetch or copy",
            ["replica"],
            _OVERHEAD_BUCKETS_S,
        )

        self._prefetch_chunks = self._counter(
            "prefetch_chunks",
            "Chunks asked for before forwarding, by what became of them in time",
            ["replica", "result"],
        )
        self._prefetch_bytes = self._counter(
            "prefetch_bytes", "Bytes promoted before forwarding", ["replica"]
        )
        self._prefetches = self._counter(
            "prefetches", "Prefetches that requests waited for, by how they ended", _BY_RESULT
        )
        self._copies = self._counter(
            "copies", "Copies of other replicas' KV, by how they ended", _BY_RESULT
        )
        self._copy_bytes = self._counter(
            "copy_bytes", "Bytes copied from other replicas before forwarding", ["replica"]
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        replica = record.replica_id or _NO_REPLICA
        status = str(record.status) if record.status is not None else "none"
        self._requests.labels(record.endpoint, replica, status, record.outcome).inc()
        for each in record.failed_tries:
            self._failed_tries.labels(each.replica_id, each.cause).inc()
        if record.read_s is not None:
            self._read.observe(record.read_s)
        if record.place_s is not None:
            self._place.observe(record.place_s)
        if record.held_s is not None:
            self._admission_wait.observe(record.held_s)
        if record.rejected is not None:
            self._rejected.labels(record.rejected).inc()
        if record.reason is not None:
            self._decisions.labels(record.reason).inc()
        if record.prompt_tokens is not None:
            self._prompt_tokens.labels(replica).inc(record.prompt_tokens)
        for tier, count in record.matched_tokens.items():
            self._matched_tokens.labels(replica, tier).inc(count)
        self._observe_preparation(record.prepared, replica)
        if record.cached_tokens is not None:
            self._cached_tokens.labels(replica).inc(record.cached_tokens)
        if record.ttft_s is not None:
            self._ttft.labels(replica, str(record.streamed).lower()).observe(record.ttft_s)
        self._response_bytes.labels(replica).inc(record.response_bytes)
        self._duration.labels(replica).observe(record.total_s)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _observe_preparation(self, prepared: Preparation, replica: str) -> None:
        prefetch, copy = prepared.prefetch, prepared.copy
        if prefetch is not None or copy is not None:
            self._prefetch_wait.labels(replica).observe(prepared.waited_s)
        if prefetch is not None:
            self._prefetches.labels(replica, prefetch.timing).inc()
            self._prefetch_bytes.labels(replica).inc(prefetch.promoted_bytes)
            for result in ("promoted", "pending", "missing"):
                chunks = getattr(prefetch, result)
                self._prefetch_chunks.labels(replica, result).inc(chunks)
        if copy is not None:
            self._copies.labels(replica, copy.timing).inc()
            self._copy_bytes.labels(replica).inc(copy.moved_bytes)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"warmroute_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(
            f"warmroute_{name}", text, labels, buckets=buckets, registry=self._registry
        )


class _FleetCollector(Collector):
    """Gauges that are read from the fleet at each scrape, not kept beside it."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[ReplicaGauges]],
        sizes: Callable[[], dict[str, int]],
    ) -> None:
        self._replicas = replicas
        self._sizes = sizes

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "warmroute_replica_up", "1 if requests may go there", labels=["replica", "state"]
        )
        in_flight = GaugeMetricFamily(
            "warmroute_in_flight", "Requests under way at a replica", labels=["replica"]
        )
        learned = _LearnedGauges()
        for each in self._replicas():
            up.add_metric([each.replica_id, each.state], float(each.is_up))
            in_flight.add_metric([each.replica_id], each.in_flight)
            learned.add(each)
        entries = GaugeMetricFamily(
            "warmroute_table_entries", "Entries in the router's bounded tables", labels=["table"]
        )
        for table, count in self._sizes().items():
            entries.add_metric([table], count)
        return [up, in_flight, *learned.families, entries]


class _LearnedGauges:
    """How well each replica's TTFTs are predicted, and from which rates."""

    def __init__(self) -> None:
        self._ratio = GaugeMetricFamily(
            "warmroute_ttft_prediction_error_ratio",
            "How far TTFTs were from the prediction, as a part of it (0.1: 10%), "
            "over the replica's last 256 streamed answers",
            labels=["replica", "quantile"],
        )
        self._seconds = GaugeMetricFamily(
            "warmroute_ttft_prediction_error_seconds",
            "How far TTFTs were from the prediction, in seconds, over the same answers",
            labels=["replica", "quantile"],
        )
        self._bias = GaugeMetricFamily(
            "warmroute_ttft_prediction_bias",
            "Median of observed / predicted TTFT: above 1 they come later than predicted",
            labels=["replica"],
        )
        self._rates = GaugeMetricFamily(
            "warmroute_learned_rate",
            "What a replica was seen to do per second: tokens (prefill), bytes (load, disk, "
            "remote, peer), tokens x context tokens (attention), tokens x decodes (decode), "
            "requests (base)",
            labels=["replica", "part"],
        )
        self.families = (self._ratio, self._seconds, self._bias, self._rates)

    def add(self, replica: ReplicaGauges) -> None:
        """Add one replica's; nothing of what is not known yet."""
        if replica.errors is not None:
            _add_quantiles(self._ratio, replica.replica_id, replica.errors.ratio)
            _add_quantiles(self._seconds, replica.replica_id, replica.errors.seconds)
            self._bias.add_metric([replica.replica_id], replica.errors.bias)
        for part, per_second in replica.rates.items():
            self._rates.add_metric([replica.replica_id, part], per_second)


def _add_quantiles(family: GaugeMetricFamily, replica_id: str, values: Quantiles) -> None:
    for quantile, value in (("0.5", values.p50), ("0.9", values.p90), ("0.99", values.p99)):
        family.add_metric([replica_id, quantile], value)
