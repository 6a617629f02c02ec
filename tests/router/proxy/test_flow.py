"""The way of a request, as `router.proxy` tells it, is the way that a request takes."""

import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Final

import aiohttp
import pytest

import router.proxy
from router.config.settings import ReplicaConfig, RouterConfig, TokenizerConfig
from tests.router.conftest import Running, run_router
from tests.router.prompt.tokenizer_makers import llama3, write_model
from tests.router.scripted import chat_events, scripted, stream

ROUTER: Final = Path(router.proxy.__file__).parent.parent
STEP: Final = re.compile(r"^    ([a-z_.]+)\.([a-z_]+) {2,}\S", re.MULTILINE)
MOST_MODULES: Final = 20
MOST_RETURNS: Final = 4
TEMPLATE: Final = "{% for each in messages %}{{ each.content }}{% endfor %}"


def told() -> list[tuple[str, str]]:
    """The steps that the face tells of: module and function."""
    return STEP.findall(router.proxy.__doc__ or "")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """A router with a tokenizer, before one replica."""
    model = write_model(tmp_path / "model", llama3(), TEMPLATE)
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(scripted())
        replica.will(stream(*chat_events("a")))
        config = RouterConfig(
            port=0,
            replicas=(ReplicaConfig(url=replica.url),),
            tokenizer=TokenizerConfig(path=str(model)),
        )
        yield await run_router(stack, config)


async def test_the_way_that_is_told_is_the_way_that_is_taken(
    running: Running, client: aiohttp.ClientSession
) -> None:
    ask = {"stream": True, "messages": [{"role": "user", "content": "hello there " * 100}]}
    taken: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROUTER):
            module = ".".join(path.relative_to(ROUTER).with_suffix("").parts)
            taken.append((module, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        async with client.post(f"{running.url}/v1/chat/completions", json=ask) as response:
            await response.read()
        await running.record()
    finally:
        sys.setprofile(None)
    calls: Iterator[tuple[str, str]] = iter(taken)
    for step in told():
        assert step in calls, f"{step} is not on the way, or not at that place"


def test_a_request_passes_few_modules_and_returns() -> None:
    steps = told()
    to_relay = steps[: [module for module, _ in steps].index("proxy.relay") + 1]
    assert len({module for module, _ in to_relay}) <= MOST_MODULES
    returns = re.findall(r" return (\d)$", router.proxy.__doc__ or "", re.MULTILINE)
    assert [int(each) for each in returns] == list(range(1, MOST_RETURNS + 1))
