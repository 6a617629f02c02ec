"""Engines that end with their test, and how often threads interrupt each other."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cacheengine.helpers import Bench

MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """Build engines as `Bench` does; each is checked and closed after the test."""
    benches: list[Bench] = []

    def make(*args: Any, **options: Any) -> Bench:
        benches.append(Bench(*args, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.engine.check()
        bench.engine.close()


@pytest.fixture
def patient_with_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a look at an adapter's files as long as a busy machine may take."""
    monkeypatch.setattr("cacheengine.identity.kv_versions._PATIENCE_S", 20.0)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let threads interrupt each other a thousand times as often as usual."""
    with _switching_every(5e-6):
        yield


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread gives the interpreter lock away only where it means to."""
    with _switching_every(3600.0):
        yield


@contextmanager
def _switching_every(interval_s: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
