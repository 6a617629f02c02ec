"""The counts of transfers as Prometheus text, for the agent's ``/metrics``."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheengine.transfer.stats import TransferMeter

_PREFIX: Final = "warmroute_transfer_"

_COUNTERS: Final = {
    "sent_chunks": "Chunks sent to other replicas.",
    "sent_bytes": "Bytes sent to other replicas.",
    "send_missing": "Chunks that another replica asked for in vain.",
    "send_refused": "Connections of other replicas that were refused.",
    "send_failures": "Connections of other replicas that broke or made no sense.",
    "received_chunks": "Chunks fetched from other replicas.",
    "received_bytes": "Bytes fetched from other replicas.",
    "receive_corrupt": "Chunks that came damaged, and were not kept.",
    "receive_failures": "Connections to other replicas that were refused or broke.",
    "moves": "Moves into this replica that were begun.",
    "moves_failed": "Moves of which not all arrived, or the source kept what was to leave it.",
}


class TransferCollector(Collector):
    """Reads one replica's counts at each scrape."""

    def __init__(self, meter: TransferMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        """Yield all families; every field of `TransferStats` is one of them."""
        stats = self._meter.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(stats, name))


def render_transfer_metrics(meter: TransferMeter) -> str:
    """Return everything in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(TransferCollector(meter))
    return generate_latest(registry).decode()
