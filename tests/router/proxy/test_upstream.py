"""What one try at a replica gives: an answer from its first byte, or why not."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress

import aiohttp
import pytest
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict, CIMultiDictProxy

from router.config.settings import TimeoutsConfig
from router.proxy.upstream import (
    AnswerCutError,
    AttemptFailedError,
    Upstream,
    Wait,
    client_session,
    forwarded_headers,
    kept_headers,
)
from router.record.records import Cause
from tests.router.scripted import (
    Scripted,
    cut_before_headers,
    json_answer,
    scripted,
    stream,
)


@pytest.fixture
async def replica() -> AsyncIterator[Scripted]:
    async with scripted() as upstream:
        yield upstream


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with client_session() as session:
        yield session


class Client:
    """Collects keep-alives."""

    def __init__(self) -> None:
        self.got = b""

    async def keep_alive(self, status: int, headers: CIMultiDict[str], events: bytes) -> None:
        self.got += events


async def read_all(upstream: Upstream, url: str) -> tuple[int, bytes]:
    answer = await upstream.send(
        "POST", url + "/x", headers={}, body=b"{}", wait=Wait(), client=Client()
    )
    with closing(answer):
        return answer.status, b"".join([chunk async for chunk in answer.chunks()])


async def test_an_answer_is_passed_whole(replica: Scripted, session: aiohttp.ClientSession) -> None:
    replica.will(stream(b"a", b"b" * 200_000, b"c"))
    upstream = Upstream(session, TimeoutsConfig())
    assert await read_all(upstream, replica.url) == (200, b"a" + b"b" * 200_000 + b"c")


async def test_an_empty_answer_is_an_answer(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    replica.will(stream())
    assert await read_all(Upstream(session, TimeoutsConfig()), replica.url) == (200, b"")


async def test_a_connection_is_used_again_after_a_whole_answer(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    upstream = Upstream(session, TimeoutsConfig())
    connector = session.connector
    assert connector is not None
    for _ in range(3):
        await read_all(upstream, replica.url)
        assert sum(map(len, connector._conns.values())) == 1


@pytest.mark.parametrize("body", [b"{}", b"{" + b" " * (2 << 20) + b"}"], ids=["small", "large"])
async def test_an_answer_says_when_its_request_was_written(
    replica: Scripted, session: aiohttp.ClientSession, body: bytes
) -> None:
    replica.will(json_answer({}))
    before_s = time.monotonic()
    upstream = Upstream(session, TimeoutsConfig())
    answer = await upstream.send(
        "POST", replica.url + "/x", headers={}, body=body, wait=Wait(), client=Client()
    )
    with closing(answer):
        assert before_s < answer.sent_s < answer.began_s
    [seen] = replica.seen
    assert seen.body == body


async def test_a_large_body_is_not_written_in_one_turn_of_the_loop(
    replica: Scripted, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the replica reads so fast that no write has to wait."""
    replica.will(json_answer({}))
    turns = 0
    written_in: list[int] = []
    write = StreamWriter.write

    async def never_waits(*_: object) -> None:
        pass

    async def noted(self: StreamWriter, chunk: bytes | memoryview, *more: object) -> None:
        written_in.append(turns)
        await write(self, chunk)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(StreamWriter, "drain", never_waits)
    monkeypatch.setattr(StreamWriter, "write", noted)
    counting = asyncio.create_task(count())
    upstream = Upstream(session, TimeoutsConfig())
    body = b" " * (4 << 20)
    answer = await upstream.send(
        "POST", replica.url + "/x", headers={}, body=body, wait=Wait(), client=Client()
    )
    answer.close()
    counting.cancel()
    assert len(set(written_in)) >= 64


# --- idle connections that the replica closes


class Closing:
    """A server that answers the first request of a connection, and closes it at the second."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[int] = []
        """For each connection."""
        self.answers = 1
        """How many requests of a connection are answered."""
        self.takes_more = True
        """Whether it still listens after it has closed a connection."""
        self.server: asyncio.Server | None = None

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests)
        self.requests.append(0)
        with closing(writer), suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"POST" in head:
                    await reader.readexactly(2)
                self.requests[number] += 1
                if self.requests[number] > self.answers:
                    if not self.takes_more:
                        assert self.server is not None
                        self.server.close()
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.fixture
async def closing_replica() -> AsyncIterator[Closing]:
    server = Closing()
    await server.start()
    yield server
    assert server.server is not None
    server.server.close()


async def ask(upstream: Upstream, url: str, *, repeatable: bool = True) -> bytes:
    answer = await upstream.send(
        "POST", url, headers={}, body=b"{}", wait=Wait(), client=Client(), repeatable=repeatable
    )
    with closing(answer):
        return b"".join([chunk async for chunk in answer.chunks()])


async def test_a_connection_that_is_closed_as_it_is_used_again_is_replaced(
    closing_replica: Closing, session: aiohttp.ClientSession
) -> None:
    upstream = Upstream(session, TimeoutsConfig())
    assert [await ask(upstream, closing_replica.url) for _ in range(3)] == [b"ok"] * 3
    assert closing_replica.requests == [2, 2, 1]


async def test_a_new_connection_that_breaks_is_the_replicas_failure(
    closing_replica: Closing, session: aiohttp.ClientSession
) -> None:
    upstream = Upstream(session, TimeoutsConfig())
    await ask(upstream, closing_replica.url)
    closing_replica.answers = 0
    with pytest.raises(AttemptFailedError) as caught:
        await ask(upstream, closing_replica.url)
    assert caught.value.cause is Cause.CUT
    assert closing_replica.requests == [2, 1]
    with pytest.raises(AttemptFailedError):
        await ask(upstream, closing_replica.url)
    assert closing_replica.requests == [2, 1, 1], "it was new: once is enough"


async def test_a_replica_that_is_gone_at_the_second_connection_broke_off_at_the_first(
    closing_replica: Closing, session: aiohttp.ClientSession
) -> None:
    """Else a request that kills replicas would count as one that reached none."""
    upstream = Upstream(session, TimeoutsConfig())
    await ask(upstream, closing_replica.url)
    closing_replica.takes_more = False
    with pytest.raises(AttemptFailedError) as caught:
        await ask(upstream, closing_replica.url)
    assert caught.value.cause is Cause.CUT


async def test_what_must_not_be_repeated_is_not_sent_on_another_connection(
    closing_replica: Closing, session: aiohttp.ClientSession
) -> None:
    upstream = Upstream(session, TimeoutsConfig())
    await ask(upstream, closing_replica.url)
    with pytest.raises(AttemptFailedError) as caught:
        await ask(upstream, closing_replica.url, repeatable=False)
    assert caught.value.cause is Cause.CUT
    assert closing_replica.requests == [2]


async def test_nobody_listens(session: aiohttp.ClientSession) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(AttemptFailedError) as caught:
            await read_all(Upstream(session, TimeoutsConfig()), url)
    assert caught.value.cause is Cause.CONNECT


async def test_no_such_host(session: aiohttp.ClientSession) -> None:
    with pytest.raises(AttemptFailedError) as caught:
        await read_all(Upstream(session, TimeoutsConfig()), "http://nowhere.invalid")
    assert caught.value.cause is Cause.LOCAL


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_no_resources_for_a_connection(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_socket(*given: object, **more: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("aiohappyeyeballs.impl.socket.socket", no_socket)
    with pytest.raises(AttemptFailedError) as caught:
        await read_all(Upstream(session, TimeoutsConfig()), "http://127.0.0.1:1")
    assert caught.value.cause is Cause.LOCAL


async def test_a_cut_before_the_headers(replica: Scripted, session: aiohttp.ClientSession) -> None:
    replica.will(cut_before_headers)
    with pytest.raises(AttemptFailedError) as caught:
        await read_all(Upstream(session, TimeoutsConfig()), replica.url)
    assert caught.value.cause is Cause.CUT


async def test_a_cut_between_the_headers_and_the_first_byte(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    """vLLM sends a stream's headers at once and may die during the prefill."""
    replica.will(stream(cut=True))
    with pytest.raises(AttemptFailedError) as caught:
        await read_all(Upstream(session, TimeoutsConfig()), replica.url)
    assert caught.value.cause is Cause.CUT


async def test_a_cut_after_the_first_byte(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    replica.will(stream(b"data: one\n\n", cut=True))
    upstream = Upstream(session, TimeoutsConfig())
    got = b""
    answer = await upstream.send(
        "POST", replica.url + "/x", headers={}, body=b"{}", wait=Wait(), client=Client()
    )
    with closing(answer), pytest.raises(AnswerCutError):
        async for chunk in answer.chunks():
            got += chunk
    assert got == b"data: one\n\n"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (429, Cause.BUSY),
        (500, Cause.ERROR),
        (502, Cause.STATUS),
        (503, Cause.STATUS),
        (504, Cause.STATUS),
    ],
)
async def test_a_refusal_is_kept_with_its_body(
    replica: Scripted, session: aiohttp.ClientSession, status: int, cause: Cause
) -> None:
    replica.will(json_answer({"why": "busy"}, status=status, **{"Retry-After": "7"}))
    with pytest.raises(AttemptFailedError) as caught:
        await read_all(Upstream(session, TimeoutsConfig()), replica.url)
    answer = caught.value.answer
    assert caught.value.cause is cause and answer is not None
    assert (answer.status, answer.body) == (status, b'{"why": "busy"}')
    assert answer.headers["Retry-After"] == "7"


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_other_errors_are_answers(
    replica: Scripted, session: aiohttp.ClientSession, status: int
) -> None:
    replica.will(json_answer("no", status=status))
    upstream = Upstream(session, TimeoutsConfig())
    assert await read_all(upstream, replica.url) == (status, b'"no"')


async def test_a_redirect_is_not_followed(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    replica.will(json_answer("", status=307, Location="http://elsewhere.invalid/"))
    assert (await read_all(Upstream(session, TimeoutsConfig()), replica.url))[0] == 307


async def test_no_first_byte_in_time(replica: Scripted, session: aiohttp.ClientSession) -> None:
    replica.will(stream(b"late", gates=(asyncio.Event(),)))
    # Long enough that the request reaches the replica, on a busy machine too.
    with pytest.raises(AttemptFailedError, match=r"no first byte within 0\.5 s") as caught:
        await read_all(Upstream(session, TimeoutsConfig(first_byte_s=0.5)), replica.url)
    assert caught.value.cause is Cause.TIMEOUT
    await replica.aborted.wait()


async def test_cancelling_closes_the_connection(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    replica.will(stream(b"never", gates=(asyncio.Event(),)))
    task = asyncio.create_task(read_all(Upstream(session, TimeoutsConfig()), replica.url))
    await replica.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await replica.aborted.wait()


async def test_leaving_early_closes_the_connection(
    replica: Scripted, session: aiohttp.ClientSession
) -> None:
    replica.will(stream(b"data: one\n\n", b"never", gates=(None, asyncio.Event())))
    upstream = Upstream(session, TimeoutsConfig())
    (
        await upstream.send(
            "POST", replica.url + "/x", headers={}, body=b"{}", wait=Wait(), client=Client()
        )
    ).close()
    await replica.aborted.wait()


def proxied(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def test_headers_of_one_connection_are_dropped() -> None:
    headers = proxied(
        ("Connection", "keep-alive, X-Private"),
        ("X-Private", "1"),
        ("Keep-Alive", "5"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "h2c"),
        ("Set-Cookie", "a"),
        ("Set-Cookie", "b"),
    )
    assert list(kept_headers(headers).items()) == [("Set-Cookie", "a"), ("Set-Cookie", "b")]


def test_the_clients_authorization_is_passed_unless_the_replica_has_its_own() -> None:
    headers = proxied(("Host", "router"), ("Authorization", "Bearer mine"), ("X-Api-Key", "mine"))
    passed = forwarded_headers(headers, request_id="r1", api_key=None, is_keyed=False)
    assert dict(passed) == {
        "Authorization": "Bearer mine",
        "X-Api-Key": "mine",
        "X-Request-Id": "r1",
    }
    own = forwarded_headers(headers, request_id="r1", api_key="theirs", is_keyed=False)
    assert dict(own) == {"Authorization": "Bearer theirs", "X-Request-Id": "r1"}


@pytest.mark.parametrize("odd", ["\x01", "a\x7fb", "\x1b[31m"])
def test_a_header_that_no_server_may_send_is_left_out(odd: str) -> None:
    told = CIMultiDictProxy(CIMultiDict({"X-Odd": odd, "X-Tab": "a\tb", "X": "\udcff"}))
    assert dict(kept_headers(told)) == {"X-Tab": "a\tb", "X": "\udcff"}
