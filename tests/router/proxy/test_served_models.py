"""Requests go only to replicas that serve their model and can take their prompt."""

from typing import Any

import aiohttp
import pytest

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
