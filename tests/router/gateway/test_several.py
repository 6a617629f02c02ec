"""Several pickers before the same replicas, each with an index of its own."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config.settings import SessionConfig
from tests.router.conftest import Wait
from tests.router.gateway.conftest import CHAT, RARELY, Gateway, Picking, chat
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream

SESSIONS = [f"session-{number}" for number in range(8)]


async def two(gateway: Gateway, **changes: Any) -> list[Picking]:
    changes = {"policy": "ttft", "shares_replicas": True, **changes}
    return [(await gateway.both(**changes))[0] for _ in range(2)]


async def homes(
    client: aiohttp.ClientSession, picker: Picking, sessions: Sequence[str]
) -> list[str]:
    """Return where a turn of each of these sessions goes."""
    found = []
    for session in sessions:
        headers = {SessionConfig().header: session}
        async with client.post(picker.url + CHAT, json=chat(session), headers=headers) as answer:
            assert answer.status == 200
            found.append(answer.headers["x-warmroute-replica"])
    return found


async def test_they_agree_on_the_homes_of_sessions(
    gateway: Gateway, client: aiohttp.ClientSession
) -> None:
    """Also while one of them has a request under way that the other does not know of.

    Nothing is learned of times here: a replica that was slow would be left by its sessions.
    """
    whole = json_answer({"ok": True})
    for replica in (gateway.one, gateway.two):
        replica.will(whole)
    first, second = await two(gateway, timeouts=RARELY)
    known = await homes(client, first, SESSIONS)
    assert set(known) == {"one", "two"}
    never = stream(*chat_events("a"), b"", gates=(None, asyncio.Event()))
    for replica in (gateway.one, gateway.two):
        replica.will(never, whole)
    async with client.post(second.url + CHAT, json=chat(stream=True)) as answer:
        await answer.content.readany()
        assert second.in_flight() == 1
        other = {"one": gateway.two, "two": gateway.one}[answer.headers["x-warmroute-replica"]]
        other.will(whole)
        assert await homes(client, second, SESSIONS) == known
    assert await homes(client, first, SESSIONS) == known


async def test_they_see_the_load_that_others_make(
    gateway: Gateway, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """Of what a replica tells, the picker's own requests are not others'."""
    for replica in (gateway.one, gateway.two):
        replica.will(json_answer(CHAT_ANSWER))
    picker, _ = await gateway.both(policy="least-loaded", shares_replicas=True)
    [one, _] = picker.parts.fleet.replicas.values()
    gateway.one.metrics = LOAD
    await eventually(lambda: (one.others_running, one.others_waiting) == (4, 2))
    async with client.post(picker.url + CHAT, json=chat()) as answer:
        assert answer.headers["x-warmroute-replica"] == "two"
    gateway.one.metrics = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    await eventually(lambda: one.others_running + one.others_waiting == 0)


LOAD = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
"""


@pytest.mark.parametrize(("service", "said"), [("readiness", "NOT_SERVING"), ("", "SERVING")])
async def test_one_that_leaves_is_not_ready_and_still_picks(
    gateway: Gateway, client: aiohttp.ClientSession, service: str, said: str
) -> None:
    gateway.one.will(json_answer({"ok": True}))
    picking, _ = await gateway.both()
    settings = picking.parts.lifecycle.config.picker
    assert settings is not None
    await picking.picker.leave()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == said
    async with client.post(picking.url + CHAT, json=chat("s")) as response:
        assert await response.json() == {"ok": True}


@pytest.mark.parametrize(
    ("service", "while_down"),
    [
        ("", "SERVING"),
        ("liveness", "SERVING"),
        ("readiness", "NOT_SERVING"),
        ("envoy.service.ext_proc.v3.ExternalProcessor", "NOT_SERVING"),
    ],
)
async def test_it_is_ready_while_a_replica_is_up(
    gateway: Gateway, service: str, while_down: str
) -> None:
    config = gateway.config()
    await gateway.picker(config)
    assert config.picker is not None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.picker.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service=service)
        told = health_pb2.HealthCheckResponse.ServingStatus
        assert told.Name((await health.Check(ask)).status) == "SERVING"
        gateway.one.healthy = gateway.two.healthy = False
        async for answer in health.Watch(ask):
            if told.Name(answer.status) == while_down:
                return
