"""The engine's counts as Prometheus text, for the agent's ``/metrics``."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheengine.engine.engine import CacheEngine
from cacheengine.record import CPU, EngineStats

_PREFIX: Final = "warmroute_engine_"

_GAUGES: Final = {
    "cpu_used_bytes": "Bytes in the CPU pool, those under way included.",
    "cpu_held_bytes": "Bytes in the CPU pool that cannot be evicted now.",
    "put_queue_bytes": "Bytes whose write to a lower tier is queued or under way.",
}

_COUNTERS: Final = {
    "lookups": "Chunks looked up.",
    "hits_cpu": "Lookups that found the chunk ready in the CPU pool.",
    "hits_pending": "Lookups that found the chunk being stored or promoted.",
    "hits_disk": "Lookups that found the chunk on disk, and not in the CPU pool.",
    "hits_remote": "Lookups that found the chunk in the remote tier only, as far as known.",
    "lookups_unknown": "Lookups while the remote tier was being asked.",
    "stores": "Chunks stored from the GPU.",
    "store_bytes": "Bytes stored from the GPU.",
    "store_drops": "Chunks not stored, for want of room.",
    "store_failures": "Chunks whose store failed or was cleared.",
    "evictions": "Chunks evicted from the CPU pool.",
    "disk_evictions": "Chunks evicted from disk.",
    "puts": "Chunks written to lower tiers.",
    "put_bytes": "Bytes written to lower tiers.",
    "put_drops": "Chunks not written to lower tiers.",
    "gets": "Chunks read from lower tiers.",
    "get_bytes": "Bytes read from lower tiers.",
    "get_misses": "Chunks that a lower tier was thought to hold and did not.",
    "corrupt": "Chunks found damaged, and removed.",
    "io_errors": "Reads and writes that failed otherwise.",
    "prefetches": "Calls to promote.",
    "promoted": "Chunks promoted to the CPU pool.",
    "promoted_bytes": "Bytes promoted to the CPU pool.",
    "promote_drops": "Chunks not promoted, for want of room or because too much is pinned.",
    "prefetch_unused_chunks": "Chunks promoted or copied here that nobody used while pinned.",
    "prefetch_unused_bytes": "Bytes promoted or copied here that nobody used while pinned.",
    "pins_expired": "OperatorPins that reached their deadline unused.",
    "events_dropped": "Events that vLLM's stream lost.",
}

_TIER_COUNTERS: Final = {
    "puts": "Chunks written to a lower tier.",
    "put_bytes": "Bytes written to a lower tier.",
    "put_drops": "Chunks not written to a lower tier.",
    "gets": "Chunks read from a lower tier.",
    "get_bytes": "Bytes read from a lower tier.",
    "get_misses": "Chunks that a lower tier was thought to hold and did not.",
    "corrupt": "Chunks of a lower tier found damaged, and removed.",
    "io_errors": "Reads from and writes to a lower tier that failed otherwise.",
    "evictions": "Chunks evicted from a lower tier by this engine.",
    "asked": "Chunks that a shared tier was asked for.",
    "found": "Chunks asked for that a shared tier held.",
    "unanswered": "Chunks asked for of which a shared tier could not say.",
}


class EngineCollector(Collector):
    """Reads one engine's counts at each scrape."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all families; every count of `EngineStats` is one of them."""
        stats = self._engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
        yield from self._tier_counters(stats)
        yield from self._tiers()

    def _tier_counters(self, stats: EngineStats) -> Iterator[Metric]:
        tiers = [tier for tier in self._engine.tier_info() if tier != CPU]
        for name, text in _TIER_COUNTERS.items():
            family = CounterMetricFamily(f"{_PREFIX}tier_{name}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier], getattr(stats.below(tier), name))
            yield family

    def _tiers(self) -> Iterator[Metric]:
        families = {
            field: GaugeMetricFamily(f"{_PREFIX}tier_{field}", text, labels=["tier"])
            for field, text in (
                ("capacity_bytes", "What a tier may hold."),
                ("used_bytes", "What a tier holds."),
                ("read_bytes_per_s", "Measured speed towards the model."),
                ("write_bytes_per_s", "Measured speed away from the model."),
            )
        }
        for tier, info in self._engine.tier_info().items():
            for field, family in families.items():
                family.add_metric([tier], getattr(info, field))
        yield from families.values()


def render_metrics(engine: CacheEngine) -> str:
    """Return everything in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return generate_latest(registry).decode()
