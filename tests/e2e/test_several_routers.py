"""Two routers and two pickers before one fleet: each learns by KV events what the others did."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from router.config.settings import RatesConfig, ReplicaConfig
from router.index.prompt_keys import KvTier
from router.policy import Plane
from simulator.openai_prompts import text_of
from tests.router.conftest import Running, client, run_router
from tests.router.gateway.conftest import Gateway, gateway

__all__ = ["client", "gateway"]

SIZES = ("--gpu-tokens", "65536", "--cpu-tokens", "8192", "--disk-tokens", "0")
BLOCK_TOKENS = 64
SESSION = "x-session-id"
COMPLETIONS = "/v1/completions"
Replicas = tuple[ReplicaConfig, ...]


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    """Two simulated replicas with real KV events, in a process of their own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator", "--json", "--replicas", "2", *SIZES),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        where = orjson.loads(await process.stdout.readline())
        names = ("url", "agent_url", "instance_id")
        yield tuple(ReplicaConfig(**{n: each[n] for n in names}) for each in where["replicas"])
    finally:
        process.kill()
        await process.wait()


async def knows(door: Running, body: dict[str, Any], tokens: int) -> None:
    """Wait until a router or picker knows of this many tokens of a prompt on a GPU."""
    asked = door.parts.lifecycle.policy.parse(
        Plane.PROXY, "POST", COMPLETIONS, {}, orjson.dumps(body)
    )
    while True:
        _, decision = await door.parts.lifecycle.decide(asked)
        if max(each.matched_tokens.get(KvTier.GPU, 0) for each in decision.candidates) >= tokens:
            return
        await asyncio.sleep(0.02)


async def test_they_agree_on_every_turn_of_every_session(
    gateway: Gateway, replicas: Replicas, client: aiohttp.ClientSession
) -> None:
    shared: dict[str, Any] = {"replicas": replicas, "policy": "ttft", "shares_replicas": True}
    # A busy machine slows the replicas: one that is not measured yet must not look faster.
    # A copy takes as long as one of a real model's KV: a token has 1 byte here, not 100 KB.
    shared["rates"] = RatesConfig(prefill_tokens_per_s=500.0, peer_bytes_per_s=10_000.0)
    doors: list[Running] = [
        *[
            await run_router(gateway.stack, gateway.config(**shared, picker=None, port=0))
            for _ in range(2)
        ],
        *[(await gateway.both(**shared))[0] for _ in range(2)],
    ]
    homes: dict[int, list[str]] = {session: [] for session in range(6)}
    for session, went_to in homes.items():
        known = 0
        prompt = [(session * 977 + number) % 5000 + 1 for number in range(1024)]
        for turn in range(8):
            door = doors[(session + turn) % len(doors)]
            body = {"model": "sim", "prompt": text_of(prompt), "max_tokens": 4, "stream": True}
            headers = {SESSION: f"session-{session}"}
            async with client.post(door.url + COMPLETIONS, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
                went_to.append(answer.headers["x-warmroute-replica"])
                matched = int(answer.headers["x-warmroute-matched-gpu"])
            assert matched >= known
            known = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            async with asyncio.timeout(30):
                for each in doors:
                    await knows(each, body, known)
            prompt += [(session + 7 * number) % 5000 + 1 for number in range(256)]
    assert all(len(set(went_to)) == 1 for went_to in homes.values()), homes
    assert len({went_to[0] for went_to in homes.values()}) == 2, "not all sessions at one replica"
