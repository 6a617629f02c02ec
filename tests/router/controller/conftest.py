"""A controller with two scripted agents."""

from collections.abc import AsyncIterator

import pytest

from tests.router.controller.control_agent import ControlAgent
from tests.router.controller.controlling import Controlled, controlled, with_agents


@pytest.fixture
async def control() -> AsyncIterator[Controlled]:
    async with controlled() as made:
        yield made


@pytest.fixture
def one() -> ControlAgent:
    return ControlAgent("one")


@pytest.fixture
def two() -> ControlAgent:
    return ControlAgent("two")


@pytest.fixture
async def urls(
    control: Controlled, one: ControlAgent, two: ControlAgent
) -> AsyncIterator[list[str]]:
    async with with_agents(control, [one, two]) as made:
        yield made
