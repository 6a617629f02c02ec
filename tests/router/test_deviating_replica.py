"""A replica whose tokens differ, in a running router: matched by text until it agrees again."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from router.prompt.prompt_reader import PromptReader
from tests.router.conftest import Fleet, Wait
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.tokenizer_makers import llama3, write_model
from tests.router.scripted import Act


def tokenizing(reader: PromptReader) -> Act:
    async def act(request: web.Request) -> web.Response:
        prompt = reader.read_now("/tokenize", await request.json())
        return web.json_response({"tokens": list(prompt.token_ids or ()), "max_model_len": 4096})

    return act


@pytest.mark.parametrize("first", ["old", "new"])
async def test_the_replica_of_a_rolling_upgrade_is_matched_by_text_until_it_agrees(
    fleet: Fleet, eventually: Wait, tmp_path: Path, first: str
) -> None:
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])
    other = write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])
    old, new = (fleet.one, fleet.two) if first == "old" else (fleet.two, fleet.one)
    for upstream, path in ((old, model), (new, other)):
        upstream.entries = [{"id": "m", "root": str(model)}]
        upstream.will(tokenizing(await asyncio.to_thread(PromptReader.load, path)))
    router = await fleet.router()
    replicas = {each.config.url: each for each in router.parts.fleet.replicas.values()}
    assert not replicas[old.url].tokens_differ
    assert replicas[new.url].tokens_differ
    asked = len(old.seen)

    new.healthy = False
    await eventually(lambda: router.parts.fleet.replicas[replicas[new.url].id].state == "down")
    new.will(tokenizing(await asyncio.to_thread(PromptReader.load, model)))
    new.healthy = True
    await eventually(lambda: not replicas[new.url].tokens_differ)
    assert len(old.seen) == asked
