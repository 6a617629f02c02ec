"""Behind Envoy, the picker names the replica that prefills, for llm-d's sidecar at each replica."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import ReplicaConfig
from tests.router.agent_server import serving
from tests.router.gateway.conftest import CHAT, Gateway, Picking, chat
from tests.router.proxy.helpers import prefilling_at
from tests.router.scripted import CHAT_ANSWER, Scripted, json_answer

HEADER = "x-prefiller-host-port"
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]]}


@asynccontextmanager
async def sidecar(vllm: Scripted) -> AsyncIterator[str]:
    """A stand-in for llm-d's routing sidecar: both legs if the header names a prefiller."""
    async with aiohttp.ClientSession() as session:

        async def both_legs(request: web.Request) -> web.Response:
            body = await request.json()
            if (prefiller := request.headers.get(HEADER)) is not None:
                first = {**body, "max_tokens": 1, "stream": False}
                first["kv_transfer_params"] = {"do_remote_decode": True}
                url = f"http://{prefiller}{request.path}"
                async with session.post(url, json=first) as answer:
                    body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
            async with session.post(vllm.url + request.path, json=body) as answer:
                return web.json_response(await answer.json(), status=answer.status)

        async def passed(request: web.Request) -> web.Response:
            async with session.get(vllm.url + request.path) as answer:
                return web.Response(body=await answer.read(), status=answer.status)

        app = web.Application()
        app.router.add_get("/{path:.*}", passed)
        app.router.add_post("/{path:.*}", both_legs)
        async with serving(app) as url:
            yield url


async def picking(gateway: Gateway, *, named: bool) -> tuple[Picking, dict[str, str]]:
    """Run a picker and an Envoy before two sidecars; ``named``: whether prefillers are named."""
    urls = {
        name: await gateway.stack.enter_async_context(sidecar(vllm))
        for name, vllm in (("one", gateway.one), ("two", gateway.two))
    }
    for each in (gateway.one, gateway.two):
        each.will(json_answer({**CHAT_ANSWER, "kv_transfer_params": PARAMS}))
    config = gateway.config(
        replicas=tuple(
            ReplicaConfig(url=url, instance_id=name, nixl_role="both") for name, url in urls.items()
        )
    )
    assert config.picker is not None
    object.__setattr__(config.picker, "prefiller_header", named)
    running = await gateway.picker(config)
    await gateway.envoy(config)
    return running, urls


def bodies(upstream: Scripted) -> list[dict[str, Any]]:
    return [json.loads(each.body) for each in upstream.seen]


async def test_the_picker_names_the_prefiller_for_the_sidecar(
    gateway: Gateway, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilling_at(monkeypatch, lambda decision, fleet: fleet.replicas["two"])
    running, _ = await picking(gateway, named=True)
    async with client.post(running.url + CHAT, json=chat()) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-replica"] == "one"
        assert response.headers["x-warmroute-prefiller"] == "two"
    assert [each["kv_transfer_params"] for each in bodies(gateway.two)] == [
        {"do_remote_decode": True}
    ]
    assert [each["kv_transfer_params"] for each in bodies(gateway.one)] == [PARAMS]
    record = await running.record()
    assert record.first_leg is not None and record.first_leg.replica_id == "two"
    assert running.in_flight() == 0


async def test_both_replicas_are_in_flight_until_the_answer_begins(
    gateway: Gateway, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        await may_answer.wait()
        return web.json_response(CHAT_ANSWER)

    prefilling_at(monkeypatch, lambda decision, fleet: fleet.replicas["two"])
    running, _ = await picking(gateway, named=True)
    gateway.one.will(wait)
    answer = asyncio.create_task(client.post(running.url + CHAT, json=chat()))
    await gateway.one.arrived.wait()
    one, two = (running.parts.fleet.replicas[each] for each in ("one", "two"))
    assert (one.in_flight, two.in_flight) == (1, 1)
    may_answer.set()
    async with await answer as response:
        await response.read()
    await running.record()
    assert running.in_flight() == 0


@pytest.mark.parametrize("named", [True, False])
async def test_a_client_cannot_name_a_prefiller(
    gateway: Gateway, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """The sidecar would send the prompt to any host."""
    prefilling_at(monkeypatch, lambda decision, fleet: None if named else fleet.replicas["two"])
    running, _ = await picking(gateway, named=named)
    headers = {HEADER: "127.0.0.1:1"}
    async with client.post(running.url + CHAT, json=chat(), headers=headers) as response:
        assert response.status == 200, await response.text()
    assert "kv_transfer_params" not in bodies(gateway.one)[0]
    assert not gateway.two.seen
