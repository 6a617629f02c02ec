"""Requests that break replicas: they reach two at most, and open no breakers."""

import asyncio
from typing import Any

import aiohttp
import pytest

from router.config.settings import BreakerConfig, ReplicaConfig
from router.fleet.breaker import Circuit
from router.record.records import Cause
from tests.router.conftest import Fleet, Running
from tests.router.scripted import (
    CHAT_ANSWER,
    Act,
    Scripted,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
KEEP_ALIVE = b": keep-alive\n\n"
POISON = [
    cut_before_headers,
    stream(KEEP_ALIVE, cut=True),
    json_answer({}, status=500),
    stream(b'data: {"error": "engine died"}\n\n'),
]
NAMES = ["cut", "cut-after-keep-alives", "500", "stream-error"]


async def three(fleet: Fleet, third: Scripted, **changes: Any) -> Running:
    replicas = tuple(
        ReplicaConfig(url=each.url, instance_id=name)
        for name, each in (("one", fleet.one), ("two", fleet.two), ("three", third))
    )
    return await fleet.router(replicas=replicas, **changes)


async def ask(client: aiohttp.ClientSession, router: Running) -> int:
    async with client.post(router.url + CHAT, json=ASK) as response:
        await response.read()
        return response.status


def breakers(router: Running) -> set[Circuit]:
    return {each.breaker.state for each in router.parts.fleet.replicas.values()}


@pytest.mark.parametrize("act", POISON, ids=NAMES)
async def test_a_request_that_breaks_replicas_reaches_two_and_opens_no_breaker(
    fleet: Fleet, client: aiohttp.ClientSession, act: Act
) -> None:
    async with scripted() as third:
        for upstream in (fleet.one, fleet.two, third):
            upstream.will(act)
        breaker = BreakerConfig(failures_in_a_row=2, open_s=60.0)
        router = await three(fleet, third, retries=5, breaker=breaker)
        for turn in range(8):
            await ask(client, router)
            record = await router.record(turn + 1)
            assert len({each.replica_id for each in record.failed_tries}) == 2
            assert len(record.failed_tries) == 2
        assert breakers(router) == {Circuit.CLOSED}
        await asyncio.gather(*(ask(client, router) for _ in range(20)))
        assert breakers(router) == {Circuit.CLOSED}
        for each in router.parts.fleet.replicas.values():
            each.breaker.check()
        assert router.in_flight() == 0


@pytest.mark.parametrize("act", POISON, ids=NAMES)
async def test_a_failure_that_another_replica_does_not_repeat_counts(
    fleet: Fleet, client: aiohttp.ClientSession, act: Act
) -> None:
    fleet.one.will(act)
    fleet.two.will(json_answer(CHAT_ANSWER))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=1, open_s=60.0))
    assert await ask(client, router) == 200
    states = {id: each.breaker.state for id, each in router.parts.fleet.replicas.items()}
    assert states == {"one": Circuit.OPEN, "two": Circuit.CLOSED}


async def test_a_replica_that_was_not_harmed_does_not_use_up_the_last_try(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    async with scripted() as third:
        fleet.one.will(cut_before_headers)
        fleet.two.will(json_answer({}, status=429))
        third.will(json_answer(CHAT_ANSWER))
        router = await three(fleet, third)
        assert await ask(client, router) == 200


async def test_429_is_back_pressure(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    for upstream in (fleet.one, fleet.two):
        upstream.will(json_answer({"error": {"message": "full"}}, status=429))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=1))
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 429
        assert (await response.json())["error"]["message"] == "full"
    record = await router.record()
    assert [each.cause for each in record.failed_tries] == [Cause.BUSY] * 2
    assert breakers(router) == {Circuit.CLOSED}


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_mistake_in_the_request_is_asked_of_one_replica(
    fleet: Fleet, client: aiohttp.ClientSession, status: int
) -> None:
    fleet.one.will(json_answer({}, status=status))
    router = await fleet.router()
    assert await ask(client, router) == status
    assert not fleet.two.seen


async def test_a_500_of_what_must_not_be_repeated_is_passed_on(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({"why": "disk"}, status=500))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=1))
    async with client.post(f"{router.url}/v1/files", data=b"x") as response:
        assert (response.status, await response.json()) == (500, {"why": "disk"})
    assert not fleet.two.seen
    assert router.parts.fleet.replicas["one"].breaker.state is Circuit.OPEN
