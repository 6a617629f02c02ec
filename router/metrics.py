"""Prometheus metrics: a reader of `RequestRecord`, and gauges read when scraped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.records import Outcome, RequestRecord

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_OVERHEAD_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_NO_REPLICA: Final = "none"


@dataclass(frozen=True, kw_only=True)
class ReplicaGauges:
    """A replica's state now, as `Metrics` shows it."""

    replica_id: str
    state: str
    is_up: bool
    in_flight: int


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
        self._ttft_error = self._histogram(
            "ttft_prediction_error_seconds",
            "Absolute difference between predicted and observed time to first byte",
            ["replica"],
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
        self._prefetch_wait = self._histogram(
            "prefetch_wait_seconds",
            "How long requests were held back for their prefetch",
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

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        replica = record.replica_id or _NO_REPLICA
        status = str(record.status) if record.status is not None else "none"
        self._requests.labels(record.endpoint, replica, status, record.outcome).inc()
        for each in record.failed_tries:
            self._failed_tries.labels(each.replica_id, each.cause).inc()
        if record.reason is not None:
            self._decisions.labels(record.reason).inc()
        if record.read_s is not None:
            self._read.observe(record.read_s)
        if record.place_s is not None:
            self._place.observe(record.place_s)
        if record.prefetch_wait_s is not None:
            self._prefetch_wait.labels(replica).observe(record.prefetch_wait_s)
            self._prefetch_bytes.labels(replica).inc(record.prefetch_bytes)
        for result, chunks in record.prefetch_chunks.items():
            self._prefetch_chunks.labels(replica, result).inc(chunks)
        self._response_bytes.labels(replica).inc(record.response_bytes)
        self._duration.labels(replica).observe(record.total_s)
        self._observe_tokens(record, replica)
        self._observe_ttft(record, replica)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _observe_tokens(self, record: RequestRecord, replica: str) -> None:
        if record.prompt_tokens is not None:
            self._prompt_tokens.labels(replica).inc(record.prompt_tokens)
        for tier, count in record.matched_tokens.items():
            self._matched_tokens.labels(replica, tier).inc(count)
        if record.cached_tokens is not None:
            self._cached_tokens.labels(replica).inc(record.cached_tokens)

    def _observe_ttft(self, record: RequestRecord, replica: str) -> None:
        if record.ttft_s is None or record.outcome is Outcome.REFUSED:
            return
        streamed = str(record.streamed).lower()
        self._ttft.labels(replica, streamed).observe(record.ttft_s)
        if record.streamed and record.predicted_ttft_s is not None and not record.failed_tries:
            error_s = abs(record.ttft_s - record.predicted_ttft_s)
            self._ttft_error.labels(replica).observe(error_s)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"warmroute_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(
            f"warmroute_{name}", text, labels, buckets=buckets, registry=self._registry
        )


class _FleetCollector(Collector):
    """Gauges that are read from the fleet when somebody looks, not kept beside it."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[ReplicaGauges]],
        sizes: Callable[[], dict[str, int]],
    ) -> None:
        self._replicas = replicas
        self._sizes = sizes

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily(
            "warmroute_replica_up", "1 if requests may go there", labels=["replica", "state"]
        )
        in_flight = GaugeMetricFamily(
            "warmroute_in_flight", "Requests under way at a replica", labels=["replica"]
        )
        for each in self._replicas():
            up.add_metric([each.replica_id, each.state], float(each.is_up))
            in_flight.add_metric([each.replica_id], each.in_flight)
        entries = GaugeMetricFamily(
            "warmroute_table_entries", "Entries in the router's bounded tables", labels=["table"]
        )
        for table, count in self._sizes().items():
            entries.add_metric([table], count)
        return [up, in_flight, entries]
