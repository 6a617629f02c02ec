"""Models over real engines, which are closed after the test."""

from collections.abc import Callable, Iterator

import pytest

from tests.simulator.helpers import Bench


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**sizes: int) -> Bench:
        made.append(Bench(**sizes))
        return made[-1]

    yield make
    for each in made:
        each.close()
