"""Replicas asked for tokens: which one, how often, how long, and what becomes of bad answers."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from router.prompt.replica_tokenizer import (
    Question,
    ReplicaTokenizer,
    TokenizingReplica,
    Told,
)
from router.prompt.token_cache import Memo
from router.proxy.upstream import client_session
from tests.router.conftest import Wait
from tests.router.prompt.helpers import limit_questions
from tests.router.scripted import Act, Scripted, cut_before_headers, json_answer, scripted

TOKENS = [3, 1, 4, 1, 5]
ANSWER = json_answer({"tokens": TOKENS, "count": 5, "max_model_len": 4096})


def question(text: str = "x") -> Question:
    made = Question.of("/tokenize", {"prompt": text}, 10_000)
    assert made is not None
    return made


class Asker:
    """A `ReplicaTokenizer` before scripted replicas, with a clock that stands still."""

    def __init__(self, session: Any, *upstreams: Scripted) -> None:
        self.now_s = 0.0
        self.loads = dict.fromkeys((each.url for each in upstreams), 0)
        self.asker = ReplicaTokenizer(
            session, self.replicas, Memo(1 << 20), clock=lambda: self.now_s
        )

    def replicas(self) -> list[TokenizingReplica]:
        return [
            TokenizingReplica(url=url, load=load, headers={"Authorization": f"Bearer of {url}"})
            for url, load in self.loads.items()
        ]

    async def ask(self, text: str = "x") -> list[int] | None:
        ids = await self.asker.tokens(question(text), self.loads, "kind")
        return None if ids is None else list(ids)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.asker.counts)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine changes nothing; a test of replicas that hang is not patient."""
    limit_questions(monkeypatch, 30.0)


@pytest.fixture
async def one(stack: AsyncExitStack) -> Scripted:
    upstream = await stack.enter_async_context(scripted())
    upstream.will(ANSWER)
    return upstream


@pytest.fixture
async def two(stack: AsyncExitStack) -> Scripted:
    upstream = await stack.enter_async_context(scripted())
    upstream.will(ANSWER)
    return upstream


@pytest.fixture
async def asker(stack: AsyncExitStack, one: Scripted) -> AsyncIterator[Asker]:
    made = Asker(await stack.enter_async_context(client_session()), one)
    yield made
    made.asker.check()


@pytest.fixture
async def both(stack: AsyncExitStack, one: Scripted, two: Scripted) -> AsyncIterator[Asker]:
    made = Asker(await stack.enter_async_context(client_session()), one, two)
    yield made
    made.asker.check()


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_the_answer_is_used_and_remembered(asker: Asker, one: Scripted) -> None:
    assert await asker.ask() == TOKENS
    assert await asker.ask() == TOKENS
    (seen,) = one.seen
    assert (seen.path, json.loads(seen.body)) == ("/tokenize", {"prompt": "x"})
    assert seen.headers["Authorization"] == f"Bearer of {one.url}", "the replica's own key"
    assert asker.counts == {Told.ANSWERED: 1, Told.REMEMBERED: 1}
    assert asker.asker.asked == 1
    # Replicas that tokenize in another way have other answers.
    assert await asker.asker.tokens(question(), asker.loads, "another kind")
    assert len(one.seen) == 2


async def test_equal_prompts_at_once_are_asked_about_once(asker: Asker, one: Scripted) -> None:
    said = await asyncio.gather(*(asker.ask() for _ in range(20)))
    assert said == [TOKENS] * 20
    assert len(one.seen) == 1


def test_short_prompts_and_huge_ones_and_broken_text_are_not_asked_about() -> None:
    for text, chars in (("x", 100), ("x", 5 << 20), ("\ud800", 10_000)):
        assert Question.of("/tokenize", {"prompt": text}, chars) is None
    assert Question.of("/tokenize", {"prompt": "x"}, 10_000)


@pytest.mark.parametrize("name", ["tokens", "token_ids"])
async def test_a_long_answer_is_read_in_parts(
    asker: Asker, one: Scripted, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_questions(monkeypatch, 200.0)  # tracemalloc makes it take seconds
    tokens = [*range(1_000, 301_000)]
    one.will(json_answer({name: tokens, "prompt": "[1, 2]" * 10_000}))
    asked = question("x" * 1_200_000)
    gc.collect()
    tracemalloc.start()
    try:
        ids = await asker.asker.tokens(asked, asker.loads, "kind")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(ids or ()) == tokens
    assert not asked.sent
    assert most_bytes < 40 * len(tokens), "a list alone takes that; the server takes 20"


async def test_what_is_sent_and_held_is_bounded(
    asker: Asker, one: Scripted, monkeypatch: pytest.MonkeyPatch, eventually: Wait
) -> None:
    monkeypatch.setattr("router.prompt.replica_tokenizer._MOST_BYTES", 20_000)
    assert await asker.ask("x" * 20_000) is None
    assert one.seen == []
    monkeypatch.setattr("router.prompt.replica_tokenizer._MOST_HELD_BYTES", 30_000)
    one.will(hang)
    first = asyncio.create_task(asker.ask("a" * 19_000))
    await eventually(lambda: bool(one.seen))
    assert await asker.ask("b" * 19_000) is None
    assert len(one.seen) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_few_questions_are_under_way_at_a_time(
    asker: Asker, one: Scripted, monkeypatch: pytest.MonkeyPatch, eventually: Wait
) -> None:
    gate = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await ANSWER(request)

    one.will(wait)
    asked = [asyncio.create_task(asker.ask(str(at))) for at in range(40)]
    await eventually(lambda: len(one.seen) == 16)
    assert not any(each.done() for each in asked)
    gate.set()
    assert await asyncio.gather(*asked) == [TOKENS] * 40


async def test_questions_that_fail_together_count_as_one_failure(
    asker: Asker, one: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_questions(monkeypatch, 0.1)
    one.will(hang)
    assert await asyncio.gather(*(asker.ask(str(at)) for at in range(10))) == [None] * 10
    assert asker.counts == {Told.LATE: 10}
    assert asker.asker.answers(one.url)
    limit_questions(monkeypatch, 30.0)
    one.will(ANSWER)
    asker.now_s += 5.0
    assert await asker.ask("after the shortest pause") == TOKENS


async def test_a_replica_that_hangs_is_left_alone(
    asker: Asker, one: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts meanwhile are not delayed; after a pause one of them finds out."""
    # Long enough for a question to arrive, also on a slow machine.
    limit_questions(monkeypatch, 1.0)
    one.will(hang)
    assert await asker.ask("first") is None
    assert asker.asker.answers(one.url), "one failure says little"
    assert await asker.ask("second") is None
    assert len(one.seen) == 1
    assert asker.counts == {Told.LATE: 1, Told.NOT_ASKED: 1}
    asker.now_s += 5.0
    said = await asyncio.gather(*(asker.ask(each) for each in ("third", "fourth")))
    assert said == [None, None]
    assert len(one.seen) == 2
    asker.now_s += 9.0
    assert await asker.ask("too early: the pause has doubled") is None
    asker.now_s += 1.0
    assert await asker.ask("fifth") is None
    assert len(one.seen) == 3 and not asker.asker.answers(one.url)
    limit_questions(monkeypatch, 30.0)
    one.will(ANSWER)
    asker.now_s += 20.0
    assert await asker.ask("fifth") == TOKENS
    assert asker.asker.answers(one.url)
    assert await asker.ask("sixth") == TOKENS


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 100_000)


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'{"tokens": [1, 2')


BAD_ANSWERS: tuple[Any, ...] = (
    [1, 2],
    {},
    {"tokens": []},
    {"tokens": None},
    {"tokens": "1 2"},
    {"tokens": [1, "2"]},
    {"tokens": [1, 2.5]},
    {"tokens": [1, True]},
    {"tokens": [1, -2]},
    {"tokens": [1, 1 << 32]},
)


@pytest.mark.parametrize(
    "act",
    [
        garbage,
        endless,
        cut_before_headers,
        *map(json_answer, BAD_ANSWERS),
        *(json_answer({"tokens": TOKENS}, status=status) for status in (404, 500, 503, 204)),
        json_answer({}, status=307, Location="http://127.0.0.1:1/tokenize"),
    ],
)
async def test_nonsense_is_no_answer(
    asker: Asker, one: Scripted, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.will(act)
    assert await asker.ask() is None
    assert asker.counts == {Told.FAILED: 1}
    one.will(ANSWER)
    asker.now_s += 5.0
    assert await asker.ask() == TOKENS, "nothing of it was remembered"


async def test_a_refused_prompt_says_nothing_about_the_next_one(
    asker: Asker, one: Scripted
) -> None:
    one.will(json_answer({"error": "the template refuses it"}, status=400), ANSWER)
    assert await asker.ask("refused") is None
    assert await asker.ask("another") == TOKENS
    assert asker.counts == {Told.REFUSED: 1, Told.ANSWERED: 1}


async def test_a_connection_that_was_closed_while_idle_is_no_failure(
    asker: Asker, one: Scripted
) -> None:
    one.will(cut_before_headers, ANSWER)
    assert await asker.ask() == TOKENS


async def test_a_client_that_leaves_ends_its_question(
    asker: Asker, one: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client with the same prompt is not affected."""
    one.will(hang, ANSWER)
    leaves = asyncio.create_task(asker.ask())
    await one.arrived.wait()
    stays = asyncio.create_task(asker.ask())
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == TOKENS
    await one.aborted.wait()
    assert asker.asker.answers(one.url), "it is not the replica's fault"


async def test_the_replica_with_the_least_to_do_is_asked_and_all_in_turn(
    both: Asker, one: Scripted, two: Scripted
) -> None:
    both.loads[one.url] = 1
    assert await both.ask("first") == TOKENS
    assert (len(one.seen), len(two.seen)) == (0, 1)
    both.loads[one.url] = 0
    for at in range(4):
        await both.ask(str(at))
    assert (len(one.seen), len(two.seen)) == (2, 3)


async def test_a_replica_that_fails_is_passed_over(
    both: Asker, one: Scripted, two: Scripted
) -> None:
    both.loads[two.url] = 1
    one.will(json_answer({}, status=500))
    assert await both.ask("first") is None
    assert await both.ask("second") == TOKENS
    assert len(one.seen) == 1
    only_one = await both.asker.tokens(question("third"), [one.url], "kind")
    assert only_one is None, "the other one tokenizes in another way"
    both.asker.forget(one.url)
    assert both.asker.answers(one.url)
