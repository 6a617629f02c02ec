"""Connections over which no whole request comes."""

import asyncio
import json
import logging
import resource
import socket
from asyncio import StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import ClientConnectionResetError, web
from aiohttp.web_protocol import RequestHandler

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig, TimeoutsConfig
from tests.router.conftest import Fleet, Running, Wait
from tests.router.scripted import chat_events, stream
from warmroute_common.http_server import BODIES, Site

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SECRET = b"my secret prompt"
HALF = HEAD + b"Content-Length: 100000\r\n\r\n" + b"{" * 1000


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Running]:
    yield await fleet.router()


@asynccontextmanager
async def connected(
    router: Running,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":")[-1]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(router: Running, *pieces: bytes) -> bytes:
    """Send pieces, with a moment between them; return all that comes until the end."""
    async with connected(router) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        return await reader.read()


async def test_that_a_client_has_left_when_it_is_answered_is_no_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer_late(_: web.Request) -> web.StreamResponse:
        raise ClientConnectionResetError("Cannot write to closing transport")

    app = web.Application()
    app.router.add_get("/", answer_late)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await Site(runner, "127.0.0.1", 0, idle_s=5.0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.read()
        writer.close()
    finally:
        await runner.cleanup()
    told = [each for each in caplog.records if each.name == "warmroute.http"]
    assert [each.levelname for each in told] == ["INFO"]


def held_bytes(router: Running) -> int:
    return router.runner.app[BODIES].held_bytes


@pytest.mark.parametrize(
    "pieces",
    [
        (b"\x00\x01 " + SECRET + b"\r\n\r\n",),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET * 20,),  # a TLS ClientHello
        (HEAD + b"X: " + SECRET * 1000 + b"\r\n\r\n",),
        (HEAD + b"X-Many: a\r\n" * 500 + b"\r\n",),
        (HEAD + b"Content-Length: " + SECRET + b"\r\n\r\n",),
        (CHUNKED + SECRET + b"\r\n",),
        (CHUNKED + b"5\r\nhello\r\n", SECRET + b"\r\n"),
    ],
)
async def test_what_is_no_http_is_a_line_and_an_error_of_the_api(
    router: Running,
    caplog: pytest.LogCaptureFixture,
    eventually: Wait,
    pieces: tuple[bytes, ...],
) -> None:
    before = len(caplog.records)
    answer = await exchange(router, *pieces)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    ours = ("warmroute.http", "warmroute.requests", "warmroute", "aiohttp.server")
    # The line of a request comes from the request log's thread, after the answer.
    await eventually(lambda: any(each.name in ours for each in caplog.records[before:]))
    assert [each.name in ours for each in caplog.records[before:]].count(True) == 1
    assert SECRET.decode() not in caplog.text and "Traceback" not in caplog.text
    assert router.in_flight() == 0


async def test_a_body_that_is_not_compressed_as_it_says_leaves_no_traceback(
    router: Running, caplog: pytest.LogCaptureFixture
) -> None:
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n"
    assert (await exchange(router, head + b"{" * 9)).startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("piece", [b"", HEAD, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD])
async def test_idle_connections_and_slow_headers_are_ended(fleet: Fleet, piece: bytes) -> None:
    router = await fleet.router(timeouts=TimeoutsConfig(idle_s=0.2))
    answers = b""
    async with connected(router) as (reader, writer):
        writer.write(piece)
        # Bytes that go on coming keep no connection open, which ends by a reset then.
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"X-More: 1\r\n" if piece else b"")
                with suppress(TimeoutError):
                    answers += await asyncio.wait_for(reader.read(1000), 0.05)
    assert answers.count(b"HTTP/1.1 ") == piece.count(b"GET")


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many as this process may open: by default that is often 1024."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_files")
async def test_two_thousand_half_sent_bodies_are_ended(fleet: Fleet, eventually: Wait) -> None:
    router = await fleet.router(timeouts=TimeoutsConfig(body_s=2.0))

    async def half() -> bytes:
        async with connected(router) as (reader, writer):
            writer.write(HALF)
            return await reader.readuntil(b"\r\n\r\n")

    heads = await asyncio.gather(*(half() for _ in range(2000)))
    assert {head.split(b"\r\n")[0] for head in heads} == {b"HTTP/1.1 408 Request Timeout"}
    assert all(b"Connection: close" in head for head in heads)
    await eventually(lambda: len(router.records) == 2000)
    assert held_bytes(router) == 0


async def test_all_bodies_together_have_a_bound(fleet: Fleet, eventually: Wait) -> None:
    """One that does not fit is refused, and fits again when others have ended."""
    router = await fleet.router(max_body_bytes=100_000, max_bodies_bytes=150_000)
    large = HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 60_000
    async with connected(router) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 99_999)
        await eventually(lambda: held_bytes(router) == 99_999)
        async with connected(router) as (refused, other):
            other.write(large)
            answer = await refused.readuntil(b"overloaded")
            assert answer.startswith(b"HTTP/1.1 503 ")
        writer.write(b" ")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    await eventually(lambda: held_bytes(router) == 0)
    async with connected(router) as (reader, writer):
        writer.write(large)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")


async def test_a_body_is_held_until_its_answer_begins(fleet: Fleet) -> None:
    gates = (asyncio.Event(), asyncio.Event())
    fleet.one.will(stream(*chat_events("a", "b")[:2], gates=gates))
    router = await fleet.router()
    body = b'{"model": "m", "prompt": "x"}'
    async with connected(router) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await fleet.one.arrived.wait()
        assert held_bytes(router) == len(body)
        gates[0].set()
        await reader.readuntil(b"data: ")
        assert held_bytes(router) == 0
        gates[1].set()
        await router.record()
    assert held_bytes(router) == 0


async def test_a_client_that_never_reads_makes_its_replica_wait(
    fleet: Fleet, eventually: Wait
) -> None:
    """What the router and its sockets keep of an endless answer is bounded."""
    fleet.timeouts = TimeoutsConfig(health_interval_s=60.0, stream_idle_s=1.0)
    sent_bytes = 0
    piece = b"data: " + b"x" * (1 << 18) + b"\n\n"

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(piece)
            sent_bytes += len(piece)

    fleet.one.will(endless)
    router = await fleet.router()
    body = b'{"model": "m", "prompt": "x", "stream": true}'
    async with connected(router) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # one that can
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        # Where nothing moves any more the router ends the answer, and not before.
        await fleet.one.aborted.wait()
        assert sent_bytes < 40 << 20
    await eventually(lambda: router.in_flight() == 0)


async def test_slow_clients_have_the_kernel_keep_little(router: Running) -> None:
    async with connected(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        assert router.runner.server is not None
        [connection] = router.runner.server.connections
        assert connection.transport is not None
        made = connection.transport.get_extra_info("socket")
        unsent = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert unsent <= 128 << 10, "the default is unlimited"


async def test_a_slow_body_does_not_wake_the_router_for_each_byte(
    router: Running, monkeypatch: pytest.MonkeyPatch, eventually: Wait
) -> None:
    wakes: list[int] = []
    feed = RequestHandler.data_received

    def noted(handler: RequestHandler, data: bytes) -> None:
        # Those of this connection: others are the router's own, to its replica in this process.
        if data.startswith(b"POST ") or data[:1] == b"{":
            wakes.append(len(data))
        feed(handler, data)

    monkeypatch.setattr(RequestHandler, "data_received", noted)
    head, slow_bytes = HEAD + b"Content-Length: 300000\r\n\r\n", 200
    async with connected(router) as (reader, writer):
        writer.write(head + b"{" * (300_000 - slow_bytes))
        for _ in range(slow_bytes):
            await asyncio.sleep(0.001)
            writer.write(b"{")
        assert (await answered(reader)).startswith(b"HTTP/1.1 400 ")
        # What came at once is read in some parts, and the last bytes when all of them are there.
        assert sum(wakes) == len(head) + 300_000
        assert len(wakes) < slow_bytes / 4
        # The connection is as before: one byte is enough.
        wakes.clear()
        writer.write(HEAD + b"Content-Length: 1\r\n\r\n")
        await eventually(lambda: len(wakes) == 1)
        writer.write(b"{")
        assert (await answered(reader)).startswith(b"HTTP/1.1 400 ")
        assert len(wakes) == 2


async def test_a_client_that_leaves_amid_its_body_is_no_trouble(
    router: Running, caplog: pytest.LogCaptureFixture, eventually: Wait
) -> None:
    for ends in (StreamWriter.close, lambda writer: writer.transport.abort()):
        async with connected(router) as (_, writer):
            writer.write(HALF)
            await eventually(lambda: held_bytes(router) == 1000)
            ends(writer)
        await eventually(lambda: held_bytes(router) == 0)
    assert "failed" not in caplog.text and "Traceback" not in caplog.text


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Return the head of an answer, and read its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return head


# --- what a client expects before it sends its body


ADMITTED = new_key()
EXPECTING = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health", b"/replicas", b"/nowhere"])
async def test_an_unknown_expectation_is_refused_in_openais_shape(
    router: Running, path: bytes
) -> None:
    request = HEAD.replace(b"/v1/completions", path)
    answer = await exchange(router, request + b"Connection: close\r\nExpect: foo\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "expectation_failed"


async def test_a_body_is_asked_for_once_its_client_is_admitted(fleet: Fleet) -> None:
    key = KeyConfig(name="a", sha256=sha256_of(ADMITTED))
    router = await fleet.router(access=AccessConfig(keys=(key,)))
    large = EXPECTING.replace(b"Length: 2", b"Length: 99999999999")
    bearer = b"Authorization: Bearer " + ADMITTED.encode() + b"\r\n"
    for head, status in ((EXPECTING, b"401"), (large + bearer, b"413")):
        # The connection stays open for some seconds, for a body that may come all the same.
        async with connected(router) as (reader, writer):
            writer.write(head + b"Expect: 100-continue\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
    async with connected(router) as (reader, writer):
        writer.write(EXPECTING + bearer + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    answered = await exchange(router, EXPECTING + bearer + b"Expect: 100-continue\r\n\r\n{}")
    assert answered.startswith(b"HTTP/1.1 200 "), "a client that does not wait"


# --- bodies that come in parts


FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'


@pytest.mark.parametrize(
    ("path", "kind", "body", "status"),
    [
        (b"/v1/completions", b"application/json", b"[1, 2, 3]", b"400"),
        (b"/v1/completions", b"application/json", b'{"model":"m","prompt":"x"}', b"200"),
        (b"/v1/score", b"application/json", b'{"model":"nobody"}', b"404"),
        (b"/v1/audio/transcriptions", b"multipart/form-data; boundary=x", FORM, b"200"),
        (b"/v1/files", b"text/plain", b"hello", b"200"),
    ],
)
async def test_a_body_that_comes_in_parts_is_read_as_one(
    fleet: Fleet, path: bytes, kind: bytes, body: bytes, status: bytes
) -> None:
    router = await fleet.router()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % path
    head += b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    answer = await exchange(router, head, body[:1], body[1:4], body[4:])
    assert answer.startswith(b"HTTP/1.1 %b " % status)
    assert [each.body for each in fleet.one.seen] == ([body] if status == b"200" else [])
