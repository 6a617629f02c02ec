"""Requests whose tokens a replica tells, through the proxy and through the picker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig, ReplicaConfig
from router.prompt.prompt_reader import PromptReader
from router.record.records import Outcome
from tests.router.conftest import Fleet, Running
from tests.router.gateway.conftest import Gateway, gateway  # noqa: F401  (a fixture)
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.helpers import LONG, limit_questions
from tests.router.prompt.tokenizer_makers import llama3, write_model
from tests.router.scripted import CHAT_ANSWER, Act, Scripted, json_answer

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
KEY = new_key()


class Rendering:
    """What replicas tokenize with: a template that the router's files do not have."""

    def __init__(self, directory: Path) -> None:
        self.root = write_model(directory / "model", llama3(), TEMPLATES["parts"])
        other = write_model(directory / "other", llama3(), TEMPLATES["chatml"])
        self.reader = PromptReader.load(other)
        self.hangs = False
        self.is_asked = asyncio.Event()

    def tokens(self, body: dict[str, Any]) -> list[int]:
        return list(self.reader.read_now("/tokenize", body).token_ids or ())

    def act(self, chat: Act) -> Act:
        async def act(request: web.Request) -> web.StreamResponse:
            if request.path != "/tokenize":
                return await chat(request)
            if self.hangs:
                self.is_asked.set()
                await asyncio.Event().wait()
            tokens = self.tokens(await request.json())
            return web.json_response({"tokens": tokens, "max_model_len": 8192})

        return act

    def serve(self, *upstreams: Scripted, chat: Act | None = None) -> None:
        for each in upstreams:
            each.entries = [{"id": "m", "root": str(self.root)}]
            each.will(self.act(chat or json_answer(CHAT_ANSWER)))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine changes nothing; the test of a replica that hangs is not patient."""
    limit_questions(monkeypatch, 30.0)


@pytest.fixture
def rendering(tmp_path: Path) -> Rendering:
    return Rendering(tmp_path)


def questions(*upstreams: Scripted) -> list[Any]:
    """Return what they were asked for tokens, except for the router's probes."""
    found = [each for one in upstreams for each in one.seen if each.path == "/tokenize"]
    return [each for each in found if json.loads(each.body).get("messages") == ASK["messages"]]


async def send(client: aiohttp.ClientSession, router: Running, **headers: str) -> int:
    async with client.post(router.url + CHAT, json=ASK, headers=headers) as response:
        await response.read()
        return response.status


async def test_a_request_is_read_with_a_replicas_tokens(
    fleet: Fleet, client: aiohttp.ClientSession, rendering: Rendering
) -> None:
    """It is asked with its own key, and a retry at another replica asks nobody again."""
    rendering.serve(fleet.one, chat=json_answer({}, status=500))
    rendering.serve(fleet.two)
    replicas = tuple(
        ReplicaConfig(url=each.url, instance_id=name, api_key="theirs")
        for name, each in (("one", fleet.one), ("two", fleet.two))
    )
    router = await fleet.router(replicas=replicas)
    assert await send(client, router, Authorization="Bearer mine") == 200
    record = await router.record()
    assert record.is_exact and record.prompt_tokens == len(rendering.tokens(ASK))
    assert len(record.failed_tries) == 1
    (seen,) = questions(fleet.one, fleet.two)
    assert seen.headers["Authorization"] == "Bearer theirs"
    assert json.loads(seen.body)["messages"] == ASK["messages"]


async def test_a_key_is_charged_by_these_tokens_and_asks_nothing_when_used_up(
    fleet: Fleet, client: aiohttp.ClientSession, rendering: Rendering
) -> None:
    rendering.serve(fleet.one, fleet.two, chat=json_answer({**CHAT_ANSWER, "usage": {}}))
    key = KeyConfig(name="team", sha256=sha256_of(KEY), tokens_per_minute=1000)
    router = await fleet.router(access=AccessConfig(keys=(key,)))
    headers = {"Authorization": f"Bearer {KEY}"}
    assert len(rendering.tokens(ASK)) > 1000
    assert await send(client, router, **headers) == 200
    for _ in range(5):
        assert await send(client, router, **headers) == 429
    assert len(questions(fleet.one, fleet.two)) == 1


async def test_a_client_that_leaves_meanwhile(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    rendering: Rendering,
) -> None:
    rendering.serve(fleet.one, fleet.two)
    router = await fleet.router()
    rendering.hangs = True
    leaves = asyncio.create_task(send(client, router))
    await rendering.is_asked.wait()
    leaves.cancel()
    record = await router.record()
    assert record.outcome is Outcome.CLIENT_GONE and router.in_flight() == 0
    await asyncio.wait(
        [asyncio.ensure_future(each.aborted.wait()) for each in (fleet.one, fleet.two)],
        return_when=asyncio.FIRST_COMPLETED,
    )
    tokenizer = router.parts.prompts.replica_tokenizer
    assert tokenizer is not None
    tokenizer.check()


async def test_a_replica_that_does_not_tell_delays_nothing_for_long(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    rendering: Rendering,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are answered all the same, and matched by text."""
    rendering.serve(fleet.one, fleet.two)
    router = await fleet.router()
    # Long enough that a question reaches its replica, which is then asked no second time here.
    limit_questions(monkeypatch, 0.5)
    for name in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"router.prompt.replica_tokenizer.{name}", 600.0)
    rendering.hangs = True
    for _ in range(6):
        assert await send(client, router) == 200
    assert len(questions(fleet.one, fleet.two)) == 2, "each replica was asked once"
    assert not any(each.is_exact for each in router.records)


async def test_a_draining_replica_is_not_asked(
    fleet: Fleet, client: aiohttp.ClientSession, rendering: Rendering
) -> None:
    rendering.serve(fleet.one, fleet.two)
    router = await fleet.router()
    router.parts.fleet.drain("one")
    assert await send(client, router) == 200
    assert not questions(fleet.one) and len(questions(fleet.two)) == 1


async def test_the_picker_asks_too(
    gateway: Gateway,  # noqa: F811  (a fixture)
    client: aiohttp.ClientSession,
    rendering: Rendering,
) -> None:
    rendering.serve(gateway.one, gateway.two)
    picking, _ = await gateway.both()
    assert await send(client, picking) == 200
    record = await picking.record()
    assert record.is_exact and record.prompt_tokens == len(rendering.tokens(ASK))
    assert len(questions(gateway.one, gateway.two)) == 1
