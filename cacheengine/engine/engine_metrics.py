"""The engine's counts as Prometheus text, for the agent's ``/metrics``."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheengine.engine.engine import CacheEngine
from cacheengine.record import CPU, EngineStats, TierStats

_PREFIX: Final = "warmroute_engine_"
_OF_ONE_TIER_ONLY: Final = ("evictions", "asked", "found", "unanswered")
_TIER_GAUGES: Final = {
    "capacity_bytes": "Capacity of a tier in bytes; 0 if it is not known.",
    "used_bytes": "Bytes that a tier holds.",
    "read_bytes_per_s": "Measured read speed, towards the model.",
    "write_bytes_per_s": "Measured write speed, away from the model.",
}


class _Collector(Collector):
    """One scrape: the engine's counters, and those of others."""

    def __init__(self, engine: CacheEngine, others: dict[str, object]) -> None:
        self._engine = engine
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        stats = self._engine.stats()
        yield from _families(_PREFIX, stats)
        yield from _families(_PREFIX, stats.lower_tiers, but=_OF_ONE_TIER_ONLY)
        yield from self._by_tier(stats)
        for name, counts in self._others.items():
            yield from _families(f"warmroute_{name}_", counts)

    def _by_tier(self, stats: EngineStats) -> Iterator[Metric]:
        infos = self._engine.tier_info()
        for field in fields(TierStats):
            name, meaning = f"{_PREFIX}tier_{field.name}", field.metadata["meaning"]
            counts = CounterMetricFamily(name, meaning, labels=["tier"])
            for tier in infos:
                if tier != CPU:
                    counts.add_metric([tier], getattr(stats.below(tier), field.name))
            yield counts
        for name, meaning in _TIER_GAUGES.items():
            values = GaugeMetricFamily(f"{_PREFIX}tier_{name}", meaning, labels=["tier"])
            for tier, info in infos.items():
                values.add_metric([tier], getattr(info, name))
            yield values


def _families(prefix: str, counts: object, but: tuple[str, ...] = ()) -> Iterator[Metric]:
    """Yield each counter and gauge of a dataclass (`record.counter`)."""
    for field in fields(counts):  # type: ignore[arg-type]
        if field.metadata and field.name not in but:
            kind = CounterMetricFamily if field.metadata["kind"] == "counter" else GaugeMetricFamily
            value = getattr(counts, field.name)
            yield kind(prefix + field.name, field.metadata["meaning"], value=value)


def render_metrics(engine: CacheEngine, **others: object) -> str:
    """Return everything in Prometheus' text format; ``others`` are dataclasses of counters."""
    return generate_latest(_Collector(engine, others)).decode()
