"""The reader of each model: how it is found, compared with each replica, and dropped."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.config import TokenizerConfig
from router.prompt import Prompt, PromptSource, ServedModel
from router.prompt.reader import PromptReader
from router.proxy.upstream import client_session
from tests.router.prompt.chat_shapes import TEMPLATES, USER
from tests.router.prompt.tokenizer_makers import llama3, write_model

CHAT = "/v1/chat/completions"
PROBES = 18


class Replica:
    """A scripted replica: it tokenizes with ``model``, renders by its template, tells a version."""

    def __init__(self, model: Path) -> None:
        self.reader = PromptReader.load(model)
        self.version = "1"
        self.asked = 0
        self.status = 200
        self.url = ""

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.status != 200:
            return web.json_response({}, status=self.status)
        prompt = self.reader.read_now("/tokenize", await request.json())
        return web.json_response({"tokens": prompt.token_ids, "max_model_len": 4096})

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/version", self.tell_version)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield


class Fleet:
    """A source of readers with scripted replicas, and a clock that stands still."""

    def __init__(self, source: PromptSource, session: aiohttp.ClientSession) -> None:
        self.source = source
        self.session = session
        self.now_s = 0.0

    async def learn(self, replica: Replica, *models: ServedModel) -> None:
        await self.source.learn(models, session=self.session, url=replica.url, headers={})

    def chat(self) -> Prompt:
        return self.source.reader_for("m").read_now(CHAT, {"messages": [USER]})


Start = Callable[[Path], Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same tokenizer, and another chat template."""
    return write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])


@pytest.fixture
def served(model: Path) -> ServedModel:
    return ServedModel(id="m", root=str(model))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(path: Path) -> Replica:
            replica = Replica(path)
            await stack.enter_async_context(replica.serving())
            return replica

        yield started


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with client_session() as session:
        yield Fleet(PromptSource(TokenizerConfig()), session)


@pytest.mark.xfail(strict=True, reason="one deviating replica refutes the tokens for all")
async def test_a_replica_that_deviates_loses_exact_tokens_for_itself_only(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, other: Path
) -> None:
    old, new = await start(model), await start(other)
    await fleet.learn(old, served)
    await fleet.learn(new, served)
    assert fleet.chat().exact


@pytest.mark.xfail(strict=True, reason="a replica is asked all probes each time")
async def test_a_replica_that_agrees_is_not_asked_again(
    fleet: Fleet, start: Start, served: ServedModel, model: Path
) -> None:
    replica = await start(model)
    for _ in range(3):
        await fleet.learn(replica, served)
    assert replica.asked == PROBES


@pytest.mark.xfail(strict=True, reason="each reader has a bound of its own")
async def test_the_readers_of_all_models_share_one_bound(
    fleet: Fleet, start: Start, model: Path, other: Path
) -> None:
    fleet.source = source = PromptSource(TokenizerConfig(memo_bytes=200_000))
    replica = await start(model)
    models = [ServedModel(id=str(path), root=str(path)) for path in (model, other)]
    await fleet.learn(replica, *models)
    readers = [source.reader_for(each.id) for each in models]
    for number in range(300):
        for reader in readers:
            reader.read_now("/v1/completions", {"prompt": f"{number} " + "some words " * 50})
    memos = {id(reader.memo): reader.memo for reader in readers}
    assert sum(memo.used_bytes for memo in memos.values()) <= 200_000


@pytest.mark.xfail(strict=True, reason="readers are never dropped")
async def test_the_reader_of_a_model_that_is_no_longer_served_is_dropped(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, other: Path
) -> None:
    replica = await start(model)
    await fleet.learn(replica, served)
    dropped = weakref.ref(fleet.source.reader_for("m"))
    await fleet.learn(replica, ServedModel(id="n", root=str(other)))
    assert not fleet.source.reader_for("m").has_tokenizer
    assert fleet.source.reader_for("n").has_tokenizer
    gc.collect()
    assert dropped() is None
