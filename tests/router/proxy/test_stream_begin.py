"""A stream has begun with its first content: what comes before it counts for nothing."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.settings import BreakerConfig, TimeoutsConfig
from router.fleet.breaker import Circuit
from router.proxy.sse import StreamOpening, WholeEvents, is_final, is_keep_alive
from router.record.records import Cause, Outcome
from tests.router.conftest import Fleet, Wait
from tests.router.scripted import chat_events, cut_before_headers, json_answer, stream

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "hello"}],
}
KEEP_ALIVE = b": keep-alive\n\n"
FAILED = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


# --- what a stream says first


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"code": 500}}\n\n', 500),
        (b'data: {"error": {"code": "503"}}\r\n\r\n', 503),
        (b'data:{"error": {"type": "rate_limit_error"}}\r\r', 429),
        (b'data: {"error": {"message": "bad", "code": 400}}\n\n', 400),
        (b'data: {"error": "it died"}\n\n', 500),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n', 503),
        (b"event: error\ndata: died\n\n", 500),
        (b'data: {"type": "error", "code": "server_error", "message": "x"}\n\n', 500),
        (b'data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n', 500),
    ],
)
def test_an_error_as_first_event_is_read(event: bytes, status: int) -> None:
    opening = StreamOpening()
    assert opening.feed(KEEP_ALIVE + event) == KEEP_ALIVE
    assert opening.has_begun
    assert opening.error is not None and opening.error.status == status


@pytest.mark.parametrize(
    "event",
    [
        *chat_events("a"),
        b'data: {"error": null, "choices": []}\n\n',
        b"event: message_start\ndata: {}\n\n",
        b"data: x\n\n",
        b"data: [1]\n\n",
    ],
)
def test_content_begins_a_stream(event: bytes) -> None:
    opening = StreamOpening()
    opening.feed(event)
    assert opening.has_begun and opening.error is None and opening.held == event


@pytest.mark.parametrize(
    "event",
    [
        KEEP_ALIVE,
        b":\r\n\r\n",
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b'data: {"type": "ping"}\n\n',
        b"retry: 3000\n\n",
        b"event: x\n\n",
    ],
)
def test_keep_alives_are_passed_on_and_begin_nothing(event: bytes) -> None:
    opening = StreamOpening()
    got = b"".join(opening.feed(event[at : at + 1]) for at in range(len(event)))
    assert got.rstrip() == event.rstrip()  # a line feed may come after its carriage return
    assert not opening.has_begun


def test_events_before_any_computation_wait_for_content() -> None:
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    content = b'event: x\ndata: {"type":"response.output_text.delta"}\n\n'
    opening = StreamOpening()
    assert opening.feed(created + KEEP_ALIVE) == KEEP_ALIVE
    assert not opening.has_begun
    opening.feed(content)
    assert opening.has_begun and opening.held == created + content


def test_a_very_long_first_event_is_content() -> None:
    opening = StreamOpening()
    opening.feed(b"data: " + b"x" * (64 << 10))
    assert opening.has_begun


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_events_are_passed_on_whole(end: bytes, step: int) -> None:
    events = [f"data: {n}\u00e4".encode() + end for n in range(9)]
    body, whole, got = b"".join(events) + b"data: rest", WholeEvents(), b""
    for at in range(0, len(body), step):
        got += whole.feed(body[at : at + step])
        # What an end of two lines may be followed by belongs to it.
        assert any(got.rstrip() == b"".join(events[:n]).rstrip() for n in range(10))
    assert got + whole.rest() == body
    assert not whole.is_split


def test_an_event_without_end_is_not_held_for_ever() -> None:
    whole = WholeEvents()
    assert sum(len(whole.feed(b"x" * 100_000)) for _ in range(30)) > 1 << 20
    assert whole.is_split
    assert whole.feed(b"end\n\ndata: half").endswith(b"end\n\n") and not whole.is_split


@pytest.mark.parametrize(
    ("chunk", "final"),
    [
        (DONE, True),
        (b"data: [DONE]\r\n\r\n", True),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b"event: response.completed\ndata: {}\n\n", True),
        (b'data: {"content": "data: [DONE]"}\n\n', False),
        (b"", False),
    ],
)
def test_the_last_event_is_known(chunk: bytes, final: bool) -> None:
    assert is_final(chunk) is final


def test_comments_before_content_in_one_chunk_are_no_keep_alive() -> None:
    assert is_keep_alive(KEEP_ALIVE * 3)
    assert not is_keep_alive(KEEP_ALIVE + chat_events("a")[0])


# --- through the router


async def test_keep_alives_reach_the_client_at_once_and_are_no_first_token(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(KEEP_ALIVE, *chat_events("a"), gates=(None, gate)))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert await response.content.readany() == KEEP_ALIVE
        assert router.parts.fleet.replicas["one"].decoding == 0
        await asyncio.sleep(0.05)
        gate.set()
        await response.read()
    record = await router.record()
    assert record.ttft_s is not None and record.ttft_s >= 0.05
    assert record.outcome is Outcome.OK and router.in_flight() == 0


@pytest.mark.parametrize("rest", [(), (FAILED, DONE)], ids=["it-dies", "it-reports-an-error"])
@pytest.mark.parametrize("keep_alives", [0, 2])
async def test_a_stream_that_fails_before_its_content_is_another_replicas(
    fleet: Fleet, client: aiohttp.ClientSession, rest: tuple[bytes, ...], keep_alives: int
) -> None:
    fleet.one.will(stream(*[KEEP_ALIVE] * keep_alives, *rest, cut=not rest))
    fleet.two.will(stream(*chat_events("a")))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=1))
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 200
        got = await response.read()
    assert got == KEEP_ALIVE * keep_alives + b"".join(chat_events("a"))
    record = await router.record()
    cause = Cause.ERROR if rest else Cause.CUT
    assert [(each.replica_id, each.cause) for each in record.failed_tries] == [("one", cause)]
    assert (record.replica_id, record.outcome) == ("two", Outcome.OK)
    assert record.response_bytes == len(got)
    assert router.parts.fleet.replicas["one"].breaker.state is Circuit.OPEN
    assert router.in_flight() == 0


async def test_an_error_that_every_replica_reports_is_an_answer_with_its_status(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    for upstream in (fleet.one, fleet.two):
        upstream.will(stream(FAILED, DONE))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "engine died"
    assert (await router.record()).status == 500


async def test_a_mistake_in_the_request_stays_the_replicas_answer(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    bad = b'data: {"error": {"message": "bad", "code": 400}}\n\n'
    fleet.one.will(stream(bad, DONE))
    router = await fleet.router(breaker=BreakerConfig(failures_in_a_row=1))
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert (response.status, await response.read()) == (200, bad + DONE)
    assert not fleet.two.seen
    assert router.parts.fleet.replicas["one"].breaker.state is Circuit.CLOSED


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (stream(FAILED, DONE), "engine died"),
        (json_answer({"error": {"message": "full"}}, status=503), "full"),
        (json_answer({"error": {"message": "no such thing"}}, status=404), "no such thing"),
        (cut_before_headers, "every replica tried failed"),
    ],
    ids=["stream-error", "503", "404", "cut"],
)
async def test_after_keep_alives_an_error_is_an_event(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, second: Any, message: str
) -> None:
    fleet.one.will(stream(KEEP_ALIVE, cut=True))
    fleet.two.will(second)
    router = await fleet.router()
    async with client.post(router.url + path, json={**ASK, "max_tokens": 9}) as response:
        assert response.status == 200
        got = await response.read()
    event = got.removeprefix(KEEP_ALIVE).decode()
    if path == "/v1/messages":
        assert event.startswith("event: error\n")
        event = event.removeprefix("event: error\n")
    assert message in json.loads(event.removeprefix("data: "))["error"]["message"]
    record = await router.record()
    assert (record.status, record.outcome) == (200, Outcome.REFUSED)
    assert record.error
    assert router.in_flight() == 0


async def test_keep_alives_do_not_keep_a_stream_alive(
    fleet: Fleet, client: aiohttp.ClientSession, eventually: Wait
) -> None:
    beats = [KEEP_ALIVE, b"event: ping\ndata: {}\n\n"] * 1000
    gates = [None] + [Ticking() for _ in beats]
    fleet.one.will(stream(chat_events("a")[0], *beats, gates=tuple(gates)))
    timeouts = TimeoutsConfig(health_interval_s=0.05, stream_idle_s=0.1)
    router = await fleet.router(timeouts=replace(timeouts, drain_s=1.0))
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert b"the text so far is incomplete" in await response.read()
    record = await router.record()
    assert record.outcome is Outcome.CUT and "stream_idle_s" in (record.error or "")


class Ticking(asyncio.Event):
    """A gate that opens after a moment."""

    async def wait(self) -> Any:
        await asyncio.sleep(0.01)


async def test_a_client_that_leaves_during_keep_alives(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(KEEP_ALIVE, b"never", gates=(None, asyncio.Event())))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        assert await response.content.readany() == KEEP_ALIVE
    await fleet.one.aborted.wait()
    record = await router.record()
    assert record.outcome is Outcome.CLIENT_GONE and not record.failed_tries
    assert router.in_flight() == 0


# --- the end


@pytest.mark.parametrize("ending", [DONE, b"event: message_stop\ndata: {}\n\n"])
@pytest.mark.parametrize("leaves", [True, False], ids=["the-client-closes", "the-replica-breaks"])
async def test_an_answer_whose_last_event_was_passed_on_is_ok(
    fleet: Fleet, client: aiohttp.ClientSession, ending: bytes, leaves: bool
) -> None:
    events = (chat_events("a")[0], ending)
    if leaves:
        fleet.one.will(stream(*events, b"", gates=(None, None, asyncio.Event())))
    else:
        fleet.one.will(stream(*events, cut=True))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        if leaves:
            got = b""
            while not got.endswith(ending):
                got += await response.content.readany()
        else:
            assert await response.read() == b"".join(events)
    record = await router.record()
    assert (record.outcome, record.error) == (Outcome.OK, None)
    assert router.in_flight() == 0


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        (CHAT, (*chat_events("a")[:1], DONE)),
        ("/v1/messages", (b"event: message_stop\ndata: {}\n\n",)),
        ("/v1/responses", (b"event: response.completed\ndata: {}\n\n",)),
        ("/v1/embeddings", (b'{"data": []}',)),
    ],
)
async def test_a_client_that_closes_as_the_answer_ends(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    pieces: tuple[bytes, ...],
) -> None:
    """The replica's end and the client's come in one turn of the loop: the end cannot be written.

    OpenAI's Python client closes its connection at ``[DONE]``.
    """
    write_eof, content_type = web.StreamResponse.write_eof, "text/event-stream"

    async def closed(response: web.StreamResponse, data: bytes = b"") -> None:
        if "x-warmroute-replica" in response.headers:
            assert response._payload_writer is not None
            await response._payload_writer.drain()
            raise ConnectionResetError("Cannot write to closing transport")
        await write_eof(response, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", closed)
    if path == "/v1/embeddings":
        content_type = "application/json"
    fleet.one.will(stream(*pieces, content_type=content_type))
    router = await fleet.router()
    body = {**ASK, "input": "x", "max_tokens": 1}
    async with client.post(router.url + path, json=body) as response:
        assert await response.content.readexactly(len(b"".join(pieces))) == b"".join(pieces)
    record = await router.record()
    assert (record.outcome, record.error) == (Outcome.OK, None)
    assert router.in_flight() == 0


async def test_keep_alives_after_the_last_event_change_nothing(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    is_read = asyncio.Event()
    events = (chat_events("a")[0], DONE, KEEP_ALIVE, b"")
    fleet.one.will(stream(*events, gates=(None, None, is_read, asyncio.Event())))
    router = await fleet.router()
    async with client.post(router.url + CHAT, json=ASK) as response:
        await response.content.readuntil(DONE)
        is_read.set()
        await response.content.readuntil(KEEP_ALIVE)
    assert (await router.record()).outcome is Outcome.OK
