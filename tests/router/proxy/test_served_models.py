"""Requests go only to replicas that serve their model and can take their prompt."""

import asyncio
from math import inf
from typing import Any

import aiohttp
import pytest

from router.config.settings import TimeoutsConfig
from router.record.records import Cause
from tests.router.conftest import Fleet, Wait
from tests.router.scripted import json_answer

COMPLETIONS = "/v1/completions"


def asking(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": list(range(tokens)), **more}


@pytest.mark.parametrize(
    ("ask", "served_by"),
    [
        (asking(50), {"one", "two"}),
        (asking(150), {"two"}),
        (asking(50, max_tokens=100), {"two"}),
        (asking(50, max_tokens=50), {"one", "two"}),
        # No context takes both: vLLM shortens the answer where the context is long enough.
        (asking(50, max_tokens=1000), {"two"}),
        (asking(50, max_tokens="x"), {"one", "two"}),
    ],
)
async def test_a_prompt_goes_only_where_the_context_takes_it_and_its_answer(
    fleet: Fleet, client: aiohttp.ClientSession, ask: dict[str, Any], served_by: set[str]
) -> None:
    fleet.one.entries = [{"id": "m", "max_model_len": 100}]
    fleet.two.entries = [{"id": "m", "max_model_len": 1000}]
    router = await fleet.router()
    answered = set()
    for _ in range(4):
        async with client.post(router.url + COMPLETIONS, json=ask) as response:
            assert response.status == 200
            answered.add(response.headers["x-warmroute-replica"])
    assert answered == served_by
    async with client.post(router.url + "/explain", json=ask) as response:
        explained = await response.json()
    assert {each["replica_id"] for each in explained["candidates"]} == served_by
    for path in ("/v1/models", "/v1/models/m"):
        async with client.get(router.url + path) as response:
            told = await response.json()
        assert told.get("data", [told])[0]["max_model_len"] == 1000


async def test_a_short_context_is_used_while_the_longer_one_is_down_if_it_takes_the_prompt(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    """vLLM shortens the answer. A prompt that is too long waits for the other: 503, not 400."""
    fleet.one.entries = [{"id": "m", "max_model_len": 100}]
    fleet.two.entries = [{"id": "m", "max_model_len": 1000}]
    router = await fleet.router()
    fleet.two.healthy = False
    await eventually(lambda: router.parts.fleet.replicas["two"].state == "down")
    async with client.post(router.url + COMPLETIONS, json=asking(50, max_tokens=80)) as response:
        assert response.status == 200
    fleet.one.will(json_answer({}, status=400))
    async with client.post(router.url + COMPLETIONS, json=asking(150)) as response:
        assert response.status == 503


# --- adapters that come and go

CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
OF_VLLM = {"error": {"message": "The model `a` does not exist.", "param": "model", "code": 404}}
OF_MESSAGES = {"type": "error", "error": {"message": "The model `a` does not exist."}}


async def test_an_adapter_is_found_when_it_is_asked_for_first(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be known up to 30 s after vLLM has loaded it."""
    monkeypatch.setattr("router.feeds.health_monitor._LOOK_S", 0.0)
    monkeypatch.setattr("router.feeds.health_monitor._ASKED_PER_S", inf)
    router = await fleet.router()
    fleet.two.models = ["m", "a"]
    asked = (client.post(router.url + CHAT_PATH, json={**CHAT, "model": "a"}) for _ in range(3))
    for response in await asyncio.gather(*asked):
        assert response.status == 200
        assert response.headers["x-warmroute-replica"] == "two"
    fleet.one.models = ["m", "b"]
    async with client.get(f"{router.url}/v1/models/b") as response:
        assert response.status == 200


async def test_unknown_names_do_not_become_many_questions(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine the requests take seconds: no other look comes between them.
    monkeypatch.setattr("router.feeds.health_monitor._LOOK_S", 600.0)
    router = await fleet.router(timeouts=TimeoutsConfig(health_interval_s=60.0))
    before = fleet.one.listings
    asked = (
        client.post(router.url + CHAT_PATH, json={**CHAT, "model": f"x{n}"}) for n in range(20)
    )
    for response in await asyncio.gather(*asked):
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"
    assert fleet.one.listings - before <= 2


@pytest.mark.parametrize("body", [OF_VLLM, OF_MESSAGES])
async def test_a_replica_that_has_unloaded_an_adapter_leaves_it_to_the_other(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait, body: dict[str, Any]
) -> None:
    fleet.one.models = fleet.two.models = ["m", "a"]
    router = await fleet.router()
    fleet.one.models = ["m"]
    fleet.one.will(json_answer(body, status=404))
    async with client.post(router.url + CHAT_PATH, json={**CHAT, "model": "a"}) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-replica"] == "two"
    (failed,) = (await router.record()).failed_tries
    assert failed.cause is Cause.NO_MODEL
    one = router.parts.fleet.replicas["one"]
    await eventually(lambda: not one.serves("a"))
    assert not one.breaker._in_a_row


async def test_the_last_replicas_404_reaches_the_client(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    for each in (fleet.one, fleet.two):
        each.will(json_answer(OF_VLLM, status=404))
    async with client.post(router.url + CHAT_PATH, json={**CHAT, "model": "m"}) as response:
        assert (response.status, await response.json()) == (404, OF_VLLM)


async def test_another_404_is_an_answer(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    """Longer than what is read to find out."""
    answer = {"error": {"message": "x" * 100_000, "param": "previous_response_id"}}
    router = await fleet.router()
    fleet.one.will(json_answer(answer, status=404))
    async with client.post(router.url + CHAT_PATH, json={**CHAT, "model": "m"}) as response:
        assert (response.status, await response.json()) == (404, answer)
    assert not fleet.two.seen
