"""HTTP/1.1 as fake replicas speak it: whole requests in, ready bytes out.

aiohttp would take ten times as long for it, on cores that the routers need.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import httptools

from bench.overhead.case import SHORT_TOKENS
from bench.overhead.fake.answers import events, whole
from bench.overhead.fake.clock import StreamClock
from bench.overhead.prompts import PATH

Handler = Callable[[bytes], bytes | None]
"""From a request's body to the answer's, JSON; None: refused."""

_STREAMED: Final = b'"stream":true'
# sglang-router sends max_tokens on as max_completion_tokens.
_TOKENS: Final = re.compile(rb'_tokens": ?(\d+)')
_LAST_CHUNK: Final = b"0\r\n\r\n"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def answer(status: str, body: bytes) -> bytes:
    """Return a whole answer's bytes."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of an answer of unknown length."""
    return b"%x\r\n%s\r\n" % (len(data), data)


_WHOLE: Final = answer("200 OK", whole(SHORT_TOKENS))
_PIECE: Final = _STREAM_HEAD + chunk(b"".join(events(SHORT_TOKENS))) + _LAST_CHUNK


@cache
def slow_stream(tokens: int) -> Sequence[bytes]:
    """Return the parts of a slow answer, an event in each, head and end included."""
    chunks = [chunk(each) for each in events(tokens)]
    return [_STREAM_HEAD + chunks[0], *chunks[1:-1], chunks[-1] + _LAST_CHUNK]


_NOT_FOUND: Final = answer("404 Not Found", b'{"error":{"message":"not found"}}')
_REFUSED: Final = answer("400 Bad Request", b'{"error":{"message":"refused"}}')


@dataclass(kw_only=True)
class Replica:
    """One fake replica: what all its connections share."""

    clock: StreamClock
    handlers: Mapping[bytes, Handler]
    """By path, of what is asked beside completions."""
    note: Callable[[bytes], None]
    """Called with the body of each completion, when its answer is on its way."""


class Connection(asyncio.Protocol):
    """One client's connection: a request, its answer, the next request."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: asyncio.WriteTransport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it; a slow stream ends by that."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and answer what is whole."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._close()

    # --- the parser's calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._path, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        """More of its path has come."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """More of its body has come."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer it."""
        body = b"".join(self._body)
        if self._path == PATH.encode():
            self._complete(body)
            self._replica.note(body)
        else:
            self._write(self._told(body))
        if not self._parser.should_keep_alive():
            self._close()

    # --- answers

    def _complete(self, body: bytes) -> None:
        found = _TOKENS.search(body)
        tokens = int(found[1]) if found else SHORT_TOKENS
        if _STREAMED not in body:
            self._write(_WHOLE)
        elif tokens <= SHORT_TOKENS:
            self._write(_PIECE)
        else:
            self._stream(slow_stream(tokens))

    def _stream(self, chunks: Sequence[bytes]) -> None:
        upcoming = iter(chunks[1:])

        def step() -> bool:
            if self._transport is None:
                return False
            if (event := next(upcoming, None)) is not None:
                self._write(event)
            return event is not None

        self._write(chunks[0])
        self._replica.clock.add(step)

    def _told(self, body: bytes) -> bytes:
        handler = self._replica.handlers.get(self._path)
        if handler is None:
            return _NOT_FOUND
        told = handler(body)
        return _REFUSED if told is None else answer("200 OK", told)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
