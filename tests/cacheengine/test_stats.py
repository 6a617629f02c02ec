"""The bandwidth meter."""

import pytest

from cacheengine.record import BandwidthMeter


def test_nothing_measured_is_zero() -> None:
    assert BandwidthMeter().bytes_per_s() == 0.0


def test_overlapping_operations_share_their_time() -> None:
    meter = BandwidthMeter()
    meter.start(0.0)
    meter.start(0.0)
    meter.stop(1.0, 100)
    meter.stop(1.0, 100)
    assert meter.bytes_per_s() == 200.0


def test_idle_time_does_not_count() -> None:
    meter = BandwidthMeter()
    for start_s in (0.0, 50.0):
        meter.start(start_s)
        meter.stop(start_s + 0.5, 50)
    assert meter.bytes_per_s() == 100.0


def test_follows_a_change() -> None:
    meter = BandwidthMeter()
    for second, moved in enumerate([100] * 20 + [10] * 20):
        meter.start(float(second))
        meter.stop(float(second + 1), moved)
    assert meter.bytes_per_s() == pytest.approx(10, rel=0.1)
