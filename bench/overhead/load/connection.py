"""One request at a time over a connection that is kept, timed by when its bytes come.

aiohttp's client would be busier than the routers that are measured.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from bench.overhead.prompts import PATH

_ERROR_CHARS: Final = 200
_TIMEOUT_S: Final = 60.0
_OK: Final = 200


class BadAnswerError(Exception):
    """An answer that is not the one expected; the text says how."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer. Times of one clock, the connection's."""

    sent_s: float
    first_s: float
    """When the first byte of its body came."""
    end_s: float


class Connection(asyncio.Protocol):
    """A connection to a contender."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now``: a clock in seconds; uvloop's own counts milliseconds."""
        self._now = now
        self._transport: asyncio.WriteTransport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._sent_s = self._first_s = self._read_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, expected: bytes) -> Timing:
        """Send a request; return when its answer has come whole.

        Raises `BadAnswerError` when it is not 200 with the ``expected`` body, and
        TimeoutError.
        """
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._parts = []
        self._parser = httptools.HttpResponseParser(self)
        self._sent_s = self._now()
        self._transport.write(request)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._answered
        finally:
            self._answered = None
        timing = Timing(self._sent_s, self._first_s, self._read_s)
        _check(self._parser.get_status_code(), b"".join(self._parts), expected)
        return timing

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it; an answer that is not whole by now will never be."""
        self._transport = None
        self._fail(f"the answer broke off: {exc or 'the connection was closed'}")

    def data_received(self, data: bytes) -> None:
        """Note the bytes of an answer."""
        self._read_s = self._now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
            self.close()

    # --- the parser's calls

    def on_body(self, body: bytes) -> None:
        """Some of the body has come."""
        if not self._parts:
            self._first_s = self._read_s
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._parser.should_keep_alive():
            self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, what: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(BadAnswerError(what))


def _check(status: int, body: bytes, expected: bytes) -> None:
    if status != _OK:
        raise BadAnswerError(f"{status}: {body[:_ERROR_CHARS].decode(errors='replace')}")
    if body != expected:
        at = next(
            (i for i, pair in enumerate(zip(body, expected, strict=False)) if pair[0] != pair[1]),
            min(len(body), len(expected)),
        )
        shown = body[at : at + _ERROR_CHARS].decode(errors="replace")
        raise BadAnswerError(
            f"{len(body)} bytes, not {len(expected)}; they differ from byte {at} on: {shown}"
        )


class Connections:
    """Connections to one or several addresses in turn, opened when none is idle."""

    def __init__(self, urls: Sequence[str], expected: bytes) -> None:
        self._urls = deque(urls)
        self._expected = expected
        self._idle: dict[str, deque[Connection]] = {url: deque() for url in urls}

    async def ask(self, body: bytes) -> Timing:
        """Send a request; raises what `Connection.ask` raises, and OSError."""
        url = self._urls[0]
        self._urls.rotate(-1)
        connection = self._idle_one(url) or await _open(url)
        try:
            timing = await connection.ask(_request(url, body), self._expected)
        except (BadAnswerError, TimeoutError):
            connection.close()
            raise
        self._idle[url].append(connection)
        return timing

    def close(self) -> None:
        """Close all that are idle."""
        for connections in self._idle.values():
            for each in connections:
                each.close()

    def _idle_one(self, url: str) -> Connection | None:
        idle = self._idle[url]
        while idle:
            # The one used last: it is the least likely to be closed just now.
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None


async def _open(url: str) -> Connection:
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    _, connection = await loop.create_connection(
        lambda: Connection(time.perf_counter), parts.hostname, parts.port
    )
    return connection


def _request(url: str, body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
