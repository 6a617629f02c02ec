"""Engines that end with their test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cacheengine.building import Bench

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
