"""The reader of each model: how it is found, compared with each replica, and dropped."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.settings import TokenizerConfig
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from router.prompt.prompt_source import PromptSource, ServedModel
from router.proxy.upstream import client_session
from tests.router.prompt.chat_shapes import USER
from tests.router.prompt.helpers import Replica

CHAT = "/v1/chat/completions"
PROBES = 18
BOUND_BYTES = 200_000


class Fleet:
    """A source of readers with scripted replicas, and a clock that stands still."""

    def __init__(self, session: aiohttp.ClientSession, config: TokenizerConfig) -> None:
        self.now_s = 0.0
        self.session = session
        self.source = PromptSource(config, clock=lambda: self.now_s)

    async def learn(self, replica: Replica, *models: ServedModel) -> None:
        await self.source.learn(models, session=self.session, url=replica.url, headers={})

    def differing(self, *replicas: Replica) -> list[Replica]:
        return [each for each in replicas if self.source.differs(each.url)]

    def chat(self) -> Prompt:
        return self.source.reader_for("m").read_now(CHAT, {"messages": [USER]})


Start = Callable[[Path], Any]


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
        yield Fleet(session, TokenizerConfig(memo_bytes=BOUND_BYTES))


async def test_a_replica_that_deviates_loses_exact_tokens_for_itself_only(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, other: Path
) -> None:
    old, new = await start(model), await start(other)
    await fleet.learn(old, served)
    await fleet.learn(new, served)
    assert fleet.chat().exact
    assert fleet.differing(old, new) == [new]


async def test_the_order_in_which_replicas_are_asked_makes_no_difference(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, other: Path
) -> None:
    old, new = await start(model), await start(other)
    await fleet.learn(new, served)
    assert fleet.chat().token_ids is None, "no replica is known that has these tokens"
    assert fleet.differing(old, new) == []
    await fleet.learn(old, served)
    assert fleet.chat().exact
    assert fleet.differing(old, new) == [new]


async def test_where_all_replicas_deviate_in_chats_other_prompts_keep_their_tokens(
    fleet: Fleet, start: Start, served: ServedModel, other: Path
) -> None:
    replicas = [await start(other), await start(other)]
    for each in replicas:
        await fleet.learn(each, served)
    assert fleet.chat().token_ids is None
    reader = fleet.source.reader_for("m")
    assert reader.read_now("/v1/completions", {"prompt": "x"}).exact
    assert fleet.differing(*replicas) == []


async def test_a_replica_that_agrees_again_is_matched_by_tokens_again(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, other: Path
) -> None:
    old, new = await start(model), await start(other)
    await fleet.learn(old, served)
    await fleet.learn(new, served)
    new.reader, new.version = PromptReader.load(model), "2"
    await fleet.learn(new, served)
    assert fleet.differing(old, new) == []


async def test_a_replica_that_agrees_is_not_asked_again(
    fleet: Fleet, start: Start, served: ServedModel, model: Path
) -> None:
    replica = await start(model)
    for _ in range(3):
        await fleet.learn(replica, served)
        fleet.now_s += 10_000
    assert replica.asked == PROBES


@pytest.mark.parametrize("what", ["restart", "version", "models"])
async def test_a_replica_that_changes_is_asked_again(
    fleet: Fleet, start: Start, served: ServedModel, model: Path, what: str
) -> None:
    replica = await start(model)
    await fleet.learn(replica, served)
    models = [served]
    match what:
        case "restart":
            fleet.source.compare_again(replica.url)
        case "version":
            replica.version = "2"
        case "models":
            models.append(ServedModel(id="adapter", root=str(model), adapter_path="/a"))
    for _ in range(2):
        await fleet.learn(replica, *models)
    assert replica.asked == 2 * PROBES


async def test_a_replica_that_does_not_agree_is_asked_ever_more_rarely(
    fleet: Fleet, start: Start, served: ServedModel, model: Path
) -> None:
    replica = await start(model)
    replica.status = 500
    asked_at_s = []
    while fleet.now_s < 24 * 3600:
        before = replica.asked
        await fleet.learn(replica, served)
        if replica.asked > before:
            asked_at_s.append(fleet.now_s)
        fleet.now_s += 30
    pauses_s = [after - before for before, after in pairwise(asked_at_s)]
    assert pauses_s[:3] == [30, 60, 120]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == 3600
    replica.status = 200
    fleet.now_s += 3600
    await fleet.learn(replica, served)
    assert replica.asked == len(asked_at_s) + PROBES
    fleet.now_s += 24 * 3600
    await fleet.learn(replica, served)
    assert replica.asked == len(asked_at_s) + PROBES, "it has agreed"


async def test_a_silent_replica_changes_nothing_for_the_others(
    fleet: Fleet, start: Start, served: ServedModel, model: Path
) -> None:
    replica = await start(model)
    await fleet.learn(replica, served)
    replica.status = 500
    fleet.source.compare_again(replica.url)
    await fleet.learn(replica, served)
    assert fleet.chat().exact
    assert fleet.differing(replica) == []


async def test_the_readers_of_all_models_share_one_bound(
    fleet: Fleet, start: Start, model: Path, other: Path
) -> None:
    replica = await start(model)
    models = [ServedModel(id=str(path), root=str(path)) for path in (model, other)]
    await fleet.learn(replica, *models)
    readers = [fleet.source.reader_for(each.id) for each in models]
    for number in range(300):
        for reader in readers:
            reader.read_now("/v1/completions", {"prompt": f"{number} " + "some words " * 50})
    memos = {id(reader.memo): reader.memo for reader in readers}
    assert sum(memo.used_bytes for memo in memos.values()) <= BOUND_BYTES


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
