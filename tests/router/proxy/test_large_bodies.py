"""What bodies may cost the router: their structure is bounded, and their values are charged for."""

import asyncio
import json
import threading
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from router.policy import ParsedRequest, Policy
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from router.prompt.request_body import MAX_MEMBERS, MAX_VALUES
from tests.router.conftest import Fleet
from tests.router.proxy.helpers import ASK
from warmroute_common.http_server import BODIES

CHAT = "/v1/chat/completions"
CHATS = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "x": %s}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"[" + b"[]," * MAX_MEMBERS + b"[]]", "lists, objects"),
        (b"[" + b"null," * MAX_VALUES + b"null]", "values"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
    ids=["lists", "nulls", "depth"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_of_too_many_values_is_refused(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, value: bytes, said: str
) -> None:
    router = await fleet.router()
    headers = {"Content-Type": "application/json"}
    async with client.post(
        router.url + path, data=BytesIO(CHATS % value), headers=headers
    ) as response:
        answer = await response.json()
    assert response.status == 400
    assert said in answer["error"]["message"]
    assert not fleet.one.seen and not fleet.two.seen
    assert router.runner.app[BODIES].held_bytes == 0


async def test_an_image_counts_as_one_value(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    """So does a text, whatever it has of commas and brackets, in quotes or not."""
    router = await fleet.router()
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (8 << 20)}},
        {"type": "text", "text": '[{,\\"' * MAX_MEMBERS},
    ]
    ask = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    body = BytesIO(json.dumps(ask).encode())
    async with client.post(router.url + CHAT, data=body) as response:
        assert response.status == 200


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether bodies were parsed in the event loop's thread."""
    seen: list[bool] = []
    parse = Policy.parse

    def parsed(*given: Any, **named: Any) -> ParsedRequest:
        seen.append(threading.current_thread() is threading.main_thread())
        return parse(*given, **named)

    monkeypatch.setattr(Policy, "parse", parsed)
    return seen


@pytest.mark.parametrize(("size", "in_loop"), [(1_000, True), (300_000, False)])
async def test_a_large_body_is_parsed_in_a_thread(
    fleet: Fleet, client: aiohttp.ClientSession, threads: list[bool], size: int, in_loop: bool
) -> None:
    router = await fleet.router()
    async with client.post(router.url + CHAT, json={**ASK, "x": "x" * size}) as response:
        assert response.status == 200
    assert threads == [in_loop]


async def test_parsed_values_are_charged_until_the_prompt_is_read(
    fleet: Fleet, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was parsed is dropped then, while the request waits for its answer."""
    router = await fleet.router()
    bodies = router.runner.app[BODIES]
    held: list[int] = []
    parsed: list[Mapping[str, Any]] = []
    read = PromptReader.read

    async def reads(*given: Any, **named: Any) -> Prompt:
        held.append(bodies.held_bytes)
        return await read(*given, **named)

    async def admits(*given: Any, **more: Any) -> Any:
        held.append(bodies.held_bytes)
        parsed.append(given[0].fields)
        return await admit(*given, **more)

    lifecycle = router.parts.lifecycle
    admit = lifecycle.admit
    monkeypatch.setattr(PromptReader, "read", reads)
    monkeypatch.setattr(lifecycle, "admit", admits)
    ask = {**ASK, "kv_transfer_params": {"x": [[]] * 1_000}}
    async with client.post(router.url + CHAT, json=ask) as response:
        body_bytes = int(response.request_info.headers["Content-Length"])
        await response.read()
    assert held[0] > body_bytes + 1_000 * 56, "a list takes 56 bytes"
    assert held[1] == body_bytes
    assert parsed == [{}]
    await asyncio.sleep(0)
    assert bodies.held_bytes == 0


async def test_parsed_values_do_not_exceed_the_memory_for_bodies(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(max_body_bytes=50_000, max_bodies_bytes=60_000)
    ask = {**ASK, "tools": [[]] * 10_000}
    async with client.post(router.url + CHAT, json=ask) as response:
        assert response.status == 503
        assert "max_bodies_bytes" in (await response.json())["error"]["message"]
    assert router.runner.app[BODIES].held_bytes == 0


@pytest.mark.parametrize("other_len", [50, 150, None])
async def test_token_ids_that_no_replicas_context_takes_are_refused(
    fleet: Fleet, client: aiohttp.ClientSession, other_len: int | None
) -> None:
    """A replica that does not tell may take any number."""
    fleet.one.entries = [{"id": "m", "max_model_len": 100}]
    fleet.two.entries = [{"id": "m", "max_model_len": other_len}]
    router = await fleet.router()
    ask = {"model": "m", "prompt": list(range(120))}
    async with client.post(router.url + "/v1/completions", json=ask) as response:
        answer = await response.json()
    if other_len != 50:
        assert response.status == 200
        return
    assert response.status == 400
    assert answer["error"] == {
        "message": "the prompt has 120 tokens, and the model's context takes 100",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert not fleet.one.seen and not fleet.two.seen


@pytest.mark.parametrize(("tokens", "in_loop"), [(10_000, True), (70_000, False)])
async def test_the_keys_of_a_long_prompt_are_made_in_a_thread(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    in_loop: bool,
) -> None:
    made: list[bool] = []
    chain = Prompt.text_chain

    def chains(prompt: Prompt) -> list[int]:
        made.append(threading.current_thread() is threading.main_thread())
        return chain(prompt)

    monkeypatch.setattr(Prompt, "text_chain", chains)
    router = await fleet.router(policy="ttft")
    ask = {"model": "m", "prompt": "word" * tokens}
    async with client.post(router.url + "/v1/completions", json=ask) as response:
        assert response.status == 200
    assert made == [in_loop]
