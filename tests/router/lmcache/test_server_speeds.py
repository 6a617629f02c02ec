"""The speeds that LMCache servers measure, from two readings of their metrics."""

import re
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from router.fleet.cost_model import CostPart
from router.fleet.counter_speeds import CounterSpeeds, Speed
from router.lmcache.coordinator import Coordinator
from router.lmcache.server_monitor import ServerMonitor, server_counters
from tests.router.lmcache.helpers import FakeServer, batch, key, make_fleet, serving_fake

METRICS = Path(__file__).with_name("server_metrics.txt").read_text()
"""As lmcache 0.5.6 writes it with opentelemetry-exporter-prometheus 0.60b1.

Made by LMCache's own subscribers from events of two ranks on GPUs; other metrics are left out.
"""
ON_CPU = METRICS.replace("cuda:0", "cpu").replace("transfer_phase", "other")
"""A server without GPUs has no counters of the copies to them."""


def times(factor: float, metrics: str) -> str:
    """Return metrics whose counters have grown by a factor."""
    return re.sub(r"} (\S+)$", lambda m: f"}} {factor * float(m[1])}", metrics, flags=re.M)


def speeds(metrics: str, shared: Sequence[str] = ()) -> dict[CostPart, Speed]:
    """Return the speeds if all counters double after the first reading."""
    found, counters = CounterSpeeds(), server_counters(shared)
    assert found.read(metrics, counters) == []
    return {each.part: each for each in found.read(times(2, metrics), counters)}


def test_loads_and_reads_from_disk_and_remote_are_measured() -> None:
    """Waits for the GPU (kernel, whole loads) and reads from peers do not count."""
    assert speeds(METRICS) == {
        CostPart.LOAD: Speed(CostPart.LOAD, 16e9, 4e9),
        CostPart.DISK: Speed(CostPart.DISK, 2e9, 4),
        CostPart.REMOTE: Speed(CostPart.REMOTE, 0.5e9, 2),
    }


def test_without_a_gpu_whole_loads_are_the_speed_of_loading() -> None:
    assert speeds(ON_CPU)[CostPart.LOAD] == Speed(CostPart.LOAD, 0.25e9, 2)


def test_a_file_system_that_servers_share_is_a_remote_store() -> None:
    found = speeds(METRICS, ["fs_native"])
    assert CostPart.DISK not in found
    assert found[CostPart.REMOTE].per_second == pytest.approx(1.5e9)


def test_speeds_of_other_series_change_nothing() -> None:
    assert speeds(METRICS.replace("h2d", "d2h").replace("l2_name", "name")) == {}


async def test_a_servers_speeds_reach_the_rates_of_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks load at the same time, each its own part."""
    monkeypatch.setattr("router.lmcache.server_monitor._METRICS_EVERY_CHECKS", 1)
    async with serving_fake(FakeServer(ranks=2)) as server, aiohttp.ClientSession() as session:
        fleet = make_fleet(lmcache=server.url)
        coordinator = Coordinator(fleet)
        monitor = ServerMonitor(fleet, coordinator, session)
        for metrics in (None, None, METRICS, None, times(2, METRICS)):
            server.metrics = metrics
            await monitor.check_all()
        rates = [each.rates for each in fleet.replicas.values()]
        for each in rates:
            assert each.per_second(CostPart.LOAD) == pytest.approx(2 * 16e9)
            assert each.per_second(CostPart.DISK) == pytest.approx(2e9)
            assert each.measured_on(CostPart.DISK) == 4.0
        coordinator.apply([batch(1, tier="l2", keys=[key(0)], shared=True)])
        for factor in (4, 8):
            server.metrics = times(factor, METRICS)
            await monitor.check_all()
        await monitor.stop()
    for each in rates:
        assert each.per_second(CostPart.REMOTE) == pytest.approx(1.5e9)
        assert each.measured_on(CostPart.DISK) == 4.0


async def test_a_server_without_metrics_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.lmcache.server_monitor._METRICS_EVERY_CHECKS", 1)
    async with serving_fake(FakeServer()) as server, aiohttp.ClientSession() as session:
        fleet = make_fleet(1, lmcache=server.url)
        coordinator = Coordinator(fleet)
        monitor = ServerMonitor(fleet, coordinator, session)
        for _ in range(3):
            await monitor.check_all()
        assert coordinator.replica_servers.server_of("r0") is not None
        assert fleet.replicas["r0"].rates.measured() == {}
        await monitor.stop()
