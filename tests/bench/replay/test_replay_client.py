"""The load generator against a server that answers as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from bench.record import Record
from bench.replay.client import (
    Client,
    Prompts,
    Telling,
    always,
    ask_oracle,
    client_session,
)
from bench.workloads.session import Session, Span, Turn
from bench.workloads.texts import Texts
from simulator.api.vocabulary import text_of, tokens_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SPEED = 20.0


def answer(text: str, number: int, *, whole: bool = True) -> str:
    chunk = {"id": f"cmpl-{number}", "choices": [{"index": 0, "text": text}]}
    return f"data: {json.dumps(chunk)}\n\n" + ("data: [DONE]\n\n" if whole else "")


class Server:
    """Keeps what it was asked; answers each request as `script` says, else with one word."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.finished: list[str] = []
        self.oracle_asked: list[list[int]] = []
        self.script: dict[int, web.Response] = {}
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.sessions.append(request.headers.get("x-session-id"))
        self.headers.append(dict(request.headers))
        text = f" {text_of([number])} {text_of([5])}"
        if number not in self.script and not self.bodies[-1]["stream"]:
            choice = {"index": 0, "text": text}
            return web.json_response({"id": f"cmpl-{number}", "choices": [choice]})
        headers = {"x-warmroute-reason": "least-loaded"}
        return self.script.get(number) or web.Response(text=answer(text, number), headers=headers)

    async def finish(self, request: web.Request) -> web.StreamResponse:
        self.finished.append(request.query["session_id"])
        return web.Response()

    async def oracle(self, request: web.Request) -> web.Response:
        self.oracle_asked.append((await request.json())["token_ids"])
        told = {"instance_id": "r1", "url": self.url, "predicted_ttft_s": 0.5}
        return web.json_response(told)


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/oracle", server.oracle)
    app.router.add_post("/finish", server.finish)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def send(server: Server, *sessions: Session, **more: Any) -> list[Record]:
    asks = more.pop("oracle", False)
    telling = more.pop("telling", None)
    async with client_session(SPEED) as http:
        choose = ask_oracle(http, server.url) if asks else always(server.url)
        tokens = more.pop("sends_token_ids", False)
        prompts = Prompts(texts=Texts(1), model="sim", sends_token_ids=tokens, needs_token_ids=asks)
        return await Client(http, prompts, choose, speed=SPEED, telling=telling).run(sessions)


def request(start_s: float, number: int) -> Session:
    return Session(start_s, (Turn((Span(number, 8),), 3),))


async def test_requests_are_sent_in_order_with_what_the_router_said() -> None:
    async with serving() as server:
        first, second = await send(server, request(0.0, 1), request(1.0, 2))
    assert [body["prompt"] for body in server.bodies] == [
        text_of(Texts(1).token_ids(Span(number, 8))) for number in (1, 2)
    ]
    assert server.bodies[0] | {"prompt": ""} == {
        "model": "sim",
        "prompt": "",
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.sessions == [None, None]
    assert first.ok
    assert (first.answer_id, first.headers) == ("cmpl-0", {"reason": "least-loaded"})
    assert second.sent_s >= second.due_s == 1.0


async def test_a_sessions_next_prompt_holds_the_answer_before() -> None:
    turns = (Turn((Span(1, 8),), 2), Turn((Span(2, 4),), 2, 1.0))
    async with serving() as server:
        first, second = await send(server, Session(0.0, turns, "s-1"))
    texts = Texts(1)
    before, after = texts.token_ids(Span(1, 8)), texts.token_ids(Span(2, 4))
    assert tokens_of(server.bodies[1]["prompt"]) == [*before, 0, 5, *after]
    assert server.sessions == ["s-1", "s-1"]
    assert first.total_s is not None
    assert second.sent_s >= first.sent_s + first.total_s + 1.0
    assert [each.prompt_tokens for each in (first, second)] == [8, 14]


async def test_an_answer_that_is_not_streamed_is_asked_for_and_read_whole() -> None:
    turns = (Turn((Span(1, 8),), 2, streamed=False), Turn((Span(2, 4),), 3, streamed=False))
    async with serving() as server:
        first, second = await send(server, Session(0.0, turns, "s"))
    texts = Texts(1)
    before, after = texts.token_ids(Span(1, 8)), texts.token_ids(Span(2, 4))
    assert (server.bodies[0]["stream"], "stream_options" in server.bodies[0]) == (False, False)
    assert tokens_of(server.bodies[1]["prompt"]) == [*before, 0, 5, *after]
    assert [each.streamed for each in (first, second)] == [False, False]
    assert (first.ok, first.status, first.answer_id) == (True, 200, "cmpl-0")
    assert [each.output_tokens for each in (first, second)] == [2, 3]


async def test_sessions_are_named_and_ended_as_the_contender_wants_it() -> None:
    turns = (Turn((Span(1, 8),), 2), Turn((Span(2, 4),), 2))
    async with serving() as server:
        telling = Telling(header="x-key", finish_url=f"{server.url}/finish")
        await send(server, Session(0.0, turns, "s"), request(1.0, 3), telling=telling)
    assert [each.get("x-key") for each in server.headers] == ["s", "s", None]
    assert server.sessions == [None] * 3
    assert server.finished == ["s"]


async def test_a_session_that_cannot_be_ended_is_no_error() -> None:
    async with serving() as server:
        telling = Telling(finish_url="http://127.0.0.1:9/finish")
        (record,) = await send(
            server, Session(0.0, (Turn((Span(1, 8),), 2),), "s"), telling=telling
        )
    assert record.ok


async def test_prompts_as_token_ids() -> None:
    turns = (Turn((Span(1, 8),), 2), Turn((Span(2, 4),), 2))
    async with serving() as server:
        await send(server, Session(0.0, turns, "s"), sends_token_ids=True)
    before = Texts(1).token_ids(Span(1, 8))
    assert server.bodies[0]["prompt"] == before
    assert server.bodies[1]["prompt"] == [*before, 0, 5, *Texts(1).token_ids(Span(2, 4))]


async def test_the_oracle_is_asked_for_each_request() -> None:
    turns = (Turn((Span(1, 8),), 2), Turn((Span(2, 4),), 2))
    async with serving() as server:
        records = await send(server, Session(0.0, turns, "s"), oracle=True)
    assert server.oracle_asked == [tokens_of(body["prompt"]) for body in server.bodies]
    assert [(each.instance_id, each.predicted_ttft_s) for each in records] == [("r1", 0.5)] * 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (lambda: web.Response(status=503, text="no replica"), "503: no replica"),
        (lambda: web.Response(status=429, text="later"), "429: later"),
        (lambda: web.Response(text=answer("x", 1, whole=False)), "broke off"),
        (lambda: web.Response(text=""), "broke off"),
    ],
)
async def test_a_failure_is_an_error_and_ends_its_session_alone(
    told: Callable[[], web.Response], said: str
) -> None:
    turns = (Turn((Span(1, 8),), 2), Turn((Span(2, 4),), 2))
    async with serving() as server:
        server.script[0] = told()
        records = await send(server, Session(0.0, turns, "s"), request(2.0, 3))
    assert [each.number for each in records] == [0, 2]
    assert not records[0].ok
    assert said in str(records[0].error)
    assert records[0].ttft_s is None
    assert records[0].status == int(said[:3] if said[:3].isdigit() else 200)
    assert records[1].ok


async def test_nobody_there_is_an_error() -> None:
    server = Server()
    server.url = "http://127.0.0.1:9"
    (record,) = await asyncio.wait_for(send(server, request(0.0, 1)), 10.0)
    assert record.error is not None
    assert "Connect" in record.error
    assert record.status is None
