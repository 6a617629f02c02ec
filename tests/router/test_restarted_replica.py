"""A replica that ends with requests in flight, and another process at its addresses."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
import zmq.asyncio
from yarl import URL

from router.config.settings import ReplicaConfig, RouterConfig, TimeoutsConfig
from router.fleet.replica import ReplicaState
from router.index.prompt_keys import keys64
from tests.router.conftest import Running, Wait, run_router
from tests.router.feeds.kv_publisher import KvPublisher, publisher, stored
from tests.router.prompt.prompts_given import GivenPrompt, tokens
from tests.router.scripted import Scripted, scripted, stream
from warmroute_common.keys import HashScheme

OLD, NEW = tokens(256), tokens(256, start=5000)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def matched(router: Running, prompt: GivenPrompt) -> int:
    (replica,) = router.parts.fleet.replicas.values()
    keys = keys64(prompt.chain(HashScheme(), 16))
    return router.parts.fleet.index.match(replica.slot, keys).gpu_blocks * 16


async def publish(source: KvPublisher, prompt: GivenPrompt) -> None:
    """Publish a prompt's blocks, one message each."""
    keys, ids = keys64(prompt.chain(HashScheme(), 16)), list(prompt.token_ids or ())
    await source.publish(stored(keys[:1], ids[:16]))
    for at in range(1, len(keys)):
        block = stored(keys[at : at + 1], ids[16 * at : 16 * at + 16])
        await source.publish(block | {"parent_block_hash": keys[at - 1]})


async def test_another_process_at_a_replicas_addresses_starts_from_nothing(
    context: zmq.asyncio.Context, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Its events have earlier times and begin with number 0 again."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        upstream: Scripted = await first.enter_async_context(scripted())
        source = await first.enter_async_context(publisher(context))
        replica = ReplicaConfig(url=upstream.url, kv_events=source.endpoint)
        timeouts = TimeoutsConfig(health_interval_s=0.05)
        router = await run_router(
            stack, RouterConfig(port=0, replicas=(replica,), timeouts=timeouts)
        )
        known = router.parts.fleet.replicas[replica.name]
        await eventually(lambda: known.has_events)
        await publish(source, OLD)
        await eventually(lambda: matched(router, OLD) == 256)

        async def ask(prompt: GivenPrompt) -> int:
            body = {"model": "m", "prompt": list(prompt.token_ids or ()), "stream": True}
            async with client.post(f"{router.url}/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status

        ports = URL(upstream.url).port or 0, source.port
        upstream.will(stream(b"data: {}\n\n", gates=(asyncio.Event(),)))
        asked = [asyncio.create_task(ask(OLD)) for _ in range(20)]
        await eventually(lambda: len(upstream.seen) == 20)
        upstream.silent = True
        await eventually(lambda: upstream.unanswered >= 1)  # no probe connects while it ends
        await first.aclose()
        assert set(await asyncio.gather(*asked)) == {502}
        await eventually(lambda: matched(router, OLD) == 0)

        again = await stack.enter_async_context(scripted(port=ports[0]))
        after = await stack.enter_async_context(publisher(context, port=ports[1]))
        await after.subscribed()
        await publish(after, NEW)
        await eventually(lambda: matched(router, NEW) == 256)
        assert matched(router, OLD) == 0
        await eventually(lambda: known.state is ReplicaState.UP)
        assert await ask(NEW) == 200
        assert [each.method for each in again.seen] == ["POST"]
        assert router.in_flight() == 0
        async with client.get(f"{router.url}/metrics") as answer:
            assert re.findall(r"^\S+ -.*$", await answer.text(), re.MULTILINE) == []
        router.parts.fleet.index.check()
