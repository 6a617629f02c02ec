"""The prefetch before the forward, with a scripted agent that speaks the real wire format."""

import asyncio
from dataclasses import replace
from typing import Any, Final

import aiohttp
import pytest

from router.config.settings import PrefetchConfig, RatesConfig, ReplicaConfig
from router.record.records import Outcome
from tests.router.conftest import Fleet, Running
from tests.router.scripted import json_answer
from tests.router.staging.scripted_agent import (
    ASK,
    BLOCK,
    CHUNK,
    CHUNKS,
    PROMPT,
    Agent,
    running_agent,
)
from warmroute_common.keys import HashScheme, chunk_keys, prompt_extra_keys

PREFETCH: Final = PrefetchConfig(wait_cap_s=20.0)
SLOW: Final = RatesConfig(prefill_tokens_per_s=10.0)
"""So that a prefetch is worth more time than a busy machine takes for it."""


@pytest.fixture
async def agent(fleet: Fleet) -> Agent:
    return await fleet.stack.enter_async_context(running_agent())


async def router_with(fleet: Fleet, agent: Agent, **changes: Any) -> Running:
    values: dict[str, Any] = {
        "policy": "ttft",
        "rates": SLOW,
        "prefetch": PREFETCH,
        "replicas": (
            ReplicaConfig(url=fleet.one.url, instance_id="one", agent_url=agent.url),
            ReplicaConfig(url=fleet.two.url, instance_id="two"),
        ),
    }
    return await fleet.router(**(values | changes))


async def test_what_lies_on_disk_is_promoted_first(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    router = await router_with(fleet, agent)
    async with client.post(f"{router.url}/v1/completions", json=ASK) as response:
        headers = response.headers
    assert headers["x-warmroute-replica"] == "one"
    assert headers["x-warmroute-reason"] == "longest-match"
    assert headers["x-warmroute-prompt-tokens"] == "1000"
    assert headers["x-warmroute-matched-disk"] == str(len(CHUNKS) * CHUNK)
    count = len(CHUNKS)
    assert headers["x-warmroute-prefetch"] == (
        f"asked={count};promoted={count - 1};pending=1;missing=0"
    )
    (asked,) = agent.asked
    assert asked.keys == [key.hex() for key in CHUNKS]
    assert 0 < asked.wait_s <= PREFETCH.wait_cap_s
    record = await router.record()
    assert record.prepared.waited_s > 0
    prefetch = record.prepared.prefetch
    assert prefetch is not None and prefetch.timing == "late"
    async with client.get(f"{router.url}/metrics") as response:
        assert 'warmroute_prefetches_total{replica="one",result="late"} 1.0' in (
            await response.text()
        )
    assert router.in_flight() == 0


async def test_an_adapters_chunks_are_asked_for_as_its_own(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    lora = ("adapter", "/adapters/a")
    every, first = prompt_extra_keys(lora=lora)
    chain = HashScheme().chain(PROMPT, BLOCK, extra_keys=every, first_extra_keys=first)
    agent.chunks = chunk_keys(chain, CHUNK // BLOCK)
    for replica in (fleet.one, fleet.two):
        replica.entries = [
            {"id": "m", "root": "/models/m", "parent": None},
            {"id": lora[0], "root": lora[1], "parent": "m"},
        ]
    router = await router_with(fleet, agent)
    body = {**ASK, "model": lora[0]}
    async with client.post(f"{router.url}/v1/completions", json=body) as response:
        assert response.headers["x-warmroute-matched-disk"] == str(len(CHUNKS) * CHUNK)
    (asked,) = agent.asked
    assert asked.keys == [key.hex() for key in agent.chunks]
    assert asked.lora == lora


async def test_a_request_is_in_flight_while_its_prefetch_runs(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    agent.gate = asyncio.Event()
    router = await router_with(fleet, agent)

    async def ask() -> int:
        async with client.post(f"{router.url}/v1/completions", json=ASK) as response:
            return response.status

    asking = asyncio.create_task(ask())
    await agent.arrived.wait()
    assert router.in_flight() == 1
    assert not fleet.one.seen
    agent.gate.set()
    assert await asking == 200


async def test_a_client_that_leaves_during_the_prefetch(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    agent.gate = asyncio.Event()
    router = await router_with(fleet, agent)
    asking = asyncio.create_task(client.post(f"{router.url}/v1/completions", json=ASK).__aenter__())
    await agent.arrived.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await router.record()).outcome is Outcome.CLIENT_GONE
    assert router.in_flight() == 0
    assert not fleet.one.seen, "nothing is sent for nobody"


async def test_a_failed_prefetch_does_not_fail_the_request(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    agent.status = 500
    router = await router_with(fleet, agent)
    async with client.post(f"{router.url}/v1/completions", json=ASK) as response:
        assert response.status == 200
        assert "promoted=0" in response.headers["x-warmroute-prefetch"]
    prefetch = (await router.record()).prepared.prefetch
    assert prefetch is not None and prefetch.timing == "failed"


async def test_it_can_be_turned_off(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    router = await router_with(fleet, agent, prefetch=replace(PrefetchConfig(), enabled=False))
    async with client.post(f"{router.url}/v1/completions", json=ASK) as response:
        assert "x-warmroute-prefetch" not in response.headers
    assert not agent.asked


async def test_a_retry_elsewhere_asks_no_prefetch_there(
    fleet: Fleet, agent: Agent, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({}, status=503))
    router = await router_with(fleet, agent)
    async with client.post(f"{router.url}/v1/completions", json=ASK) as response:
        assert response.headers["x-warmroute-replica"] == "two"
        assert "x-warmroute-prefetch" not in response.headers
    assert len(agent.asked) == 1
    assert router.in_flight() == 0
