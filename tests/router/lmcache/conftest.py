"""A controller with two scripted agents."""

from collections.abc import AsyncIterator

import pytest

from tests.router.lmcache.helpers import Controlled, FakeAgent, controlled, with_agents


@pytest.fixture
async def control() -> AsyncIterator[Controlled]:
    async with controlled() as made:
        yield made


@pytest.fixture
def one() -> FakeAgent:
    return FakeAgent("one")


@pytest.fixture
def two() -> FakeAgent:
    return FakeAgent("two")


@pytest.fixture
async def urls(control: Controlled, one: FakeAgent, two: FakeAgent) -> AsyncIterator[list[str]]:
    async with with_agents(control, [one, two]) as made:
        yield made
