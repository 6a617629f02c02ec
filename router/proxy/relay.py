"""Passing a replica's answer to the client as it comes.

A stream that the replica breaks off does not look complete to the client: SSE clients get an error
event, others see the connection close before the announced end.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Self

import orjson
from aiohttp import web
from multidict import CIMultiDict

from router.api.access import IS_TENANT
from router.fleet.replica import Replica
from router.proxy.sse import KEEP_ALIVE_STARTS, WholeEvents, is_final, is_keep_alive
from router.proxy.upstream import AnswerCutError, ReplicaAnswer
from router.record.records import Outcome, RequestRecord, answer_headers
from warmroute_common.api_errors import UpstreamFailedError
from warmroute_common.http_server import error_body, is_anthropic

_HEAD_BYTES: Final = 4 << 10
_TAIL_BYTES: Final = 16 << 10
_MOST_TAIL_BYTES: Final = 64 << 10
_USAGE_BYTES: Final = 4 << 10
"""The longest ``usage`` that is read."""
# In a JSON string the quotes would be escaped, so text that a model has
# written about "usage" does not match.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')
_RESPONSE_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"\\\x80-\xff]+)"')
_ANY_ID: Final = re.compile(rb'"id"\s*:\s*"([^"\\\x80-\xff]{1,256})"')
_CACHED: Final = (
    ("prompt_tokens_details", "cached_tokens"),
    ("input_tokens_details", "cached_tokens"),
    ("cache_read_input_tokens",),
)
_PROMPT: Final = (("prompt_tokens",), ("input_tokens",), ("total_tokens",))
_OF_PROMPT: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Anthropic's ``input_tokens`` are without these."""
_OUTPUT: Final = (("completion_tokens",), ("output_tokens",))
_EVENTS: Final = CIMultiDict(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
)
"""Headers of a stream that the router begins itself."""
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_DECODER: Final = json.JSONDecoder()


class ClientAnswer:
    """The answer as its client gets it. Its headers are sent once, with its first bytes.

    Keep-alives of a replica that then fails stay a part of it; the answer of the next replica
    follows them. So do those that the router sends while it holds the request (`held`).
    """

    def __init__(self, request: web.Request, record: RequestRecord) -> None:
        self.request = request
        self.record = record
        self._response: web.StreamResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        """A keep-alive of the router that is being sent: nothing else may be sent meanwhile."""

    @contextmanager
    def held(self, every_s: float | None) -> Iterator[None]:
        """Send a keep-alive each time that ``every_s`` have passed, while the block runs.

        None: send none. Leaving the block does not wait.
        """
        if every_s is not None:
            self._send_after(every_s)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _send_after(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()

        def send() -> None:
            self._send_after(every_s)
            if self._sending is None or self._sending.done():  # the client may not read
                events = self.keep_alive(web.HTTPOk.status_code, _EVENTS, _KEEP_ALIVE)
                self._sending = loop.create_task(events, name="keep-alive")

        self._timer = loop.call_later(every_s, send)

    @property
    def has_begun(self) -> bool:
        """Whether the client has got the headers, and so a status that cannot change."""
        return self._response is not None or self._sending is not None

    async def prepare(self, status: int, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Send the headers, unless they were sent."""
        if self._sending not in (None, asyncio.current_task()):
            await asyncio.wait([self._sending])
        if self._response is None:
            self._response = web.StreamResponse(status=status, headers=headers)
            is_tenant = self.request.get(IS_TENANT, False)
            self._response.headers.update(answer_headers(self.record, is_tenant=is_tenant))
            await self._response.prepare(self.request)
            self.record.status = status
        return self._response

    async def keep_alive(self, status: int, headers: CIMultiDict[str], events: bytes) -> None:
        """Pass on a replica's keep-alives, before its answer has begun."""
        # Where the client has left, aiohttp cancels the handler: that ends the request.
        with suppress(ConnectionResetError):
            response = await self.prepare(status, headers)
            await response.write(events)
            self.record.response_bytes += len(events)

    async def end_with_error(self, body: bytes | None = None) -> web.StreamResponse:
        """End a stream with an event for an error; ``body`` is that of an answer of its own."""
        response = await self.prepare(web.HTTPOk.status_code, _EVENTS)
        path = self.request.path
        try:
            data = orjson.dumps(orjson.loads(body or b""))  # on one line
        except orjson.JSONDecodeError:
            data = error_body(path, UpstreamFailedError("no replica gave an answer"))
        name = b"event: error\n" if is_anthropic(path) else b""
        await response.write(name + b"data: " + data + b"\n\n")
        await response.write_eof()
        return response


async def relay(
    client: ClientAnswer,
    answer: ReplicaAnswer,
    *,
    reader: "UsageReader",
    replica: Replica,
    idle_s: float | None,
) -> web.StreamResponse:
    """Stream ``answer`` to the client; note in its record how it ended.

    Events of a stream are passed on whole. Each chunk proves that ``replica`` is alive. If nothing
    but keep-alives moves for ``idle_s``, the answer is cut (the replica sends nothing) or the
    client's connection is ended (the client reads nothing).
    Raises ConnectionResetError when the client has left.
    """
    request, record = client.request, client.record
    response = await client.prepare(answer.status, answer.headers)
    events = WholeEvents() if answer.has_events else None
    last = b""  # without keep-alives
    now_s, feed, write = time.monotonic, reader.feed, response.write
    try:
        with IdleTimer(request, answer, idle_s) as idle:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    idle.is_writing = True
                    replica.heard_s = now_s()
                    # The first byte tells nearly all chunks apart, at less cost than a call.
                    is_content = chunk[0] not in KEEP_ALIVE_STARTS or not is_keep_alive(chunk)
                    if is_content:
                        idle.moved_s = replica.heard_s
                    whole = chunk if events is None else events.feed(chunk)
                    if whole:
                        feed(whole)
                        await write(whole)
                        record.response_bytes += len(whole)
                        if is_content:
                            last = whole
                    idle.is_writing = False
                    if is_content:
                        idle.moved_s = now_s()
        if events is not None and (rest := events.rest()):
            feed(rest)
            await write(rest)
            record.response_bytes += len(rest)
    except AnswerCutError as cut:
        if not is_final(last):
            record.end(Outcome.CUT, error=str(cut))
            return await _end_cut(client, response, events)
    except (asyncio.CancelledError, ConnectionResetError):
        # Clients may close as soon as they have read the last event.
        if is_final(last) or record.response_bytes == response.content_length:
            record.end(Outcome.OK)
        raise
    record.end(Outcome.OK)  # all of it was passed on: the client may close from here on
    await response.write_eof()
    return response


async def _end_cut(
    client: ClientAnswer, response: web.StreamResponse, events: WholeEvents | None
) -> web.StreamResponse:
    if events is not None and not events.is_split:
        error = UpstreamFailedError("the replica's answer broke off; the text so far is incomplete")
        return await client.end_with_error(error_body(client.request.path, error))
    response.force_close()
    if client.request.transport is not None:
        client.request.transport.abort()
    return response


class IdleTimer:
    """Ends an answer on which nothing moves for ``idle_s``, while the ``with`` block runs.

    One timer for the whole answer, which looks at `moved_s` when it fires: setting a timer for each
    chunk would cost more than passing the chunk on.
    """

    def __init__(self, request: web.Request, answer: ReplicaAnswer, idle_s: float | None) -> None:
        """``idle_s`` is None for no limit."""
        self._request = request
        self._answer = answer
        self._idle_s = idle_s
        self._timer: asyncio.TimerHandle | None = None
        self.moved_s = time.monotonic()
        """When a chunk came or was written; the relay keeps this and `is_writing` up to date."""
        self.is_writing = False
        """Whether the relay waits for the client to read."""

    def __enter__(self) -> Self:
        if self._idle_s is not None:
            self._sleep(self._idle_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _sleep(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._idle_s is not None
        left_s = self.moved_s + self._idle_s - time.monotonic()
        if left_s > 0:
            self._sleep(left_s)
        elif not self.is_writing:
            self._answer.cut("nothing came for too long (timeouts.stream_idle_s)")
        elif self._request.transport is not None:
            self._request.transport.abort()  # aiohttp then cancels the handler


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What an answer says about itself; None where it says nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    events: int = 0
    """Events of a stream."""
    stored_id: str | None = None
    """The id of what the replica stores: a response, for a later ``previous_response_id``, or a
    file."""

    @property
    def tokens_about(self) -> int | None:
        """Output tokens; of a stream that does not tell them, its events but the closing one."""
        if self.output_tokens is None and self.events:
            return self.events - 1
        return self.output_tokens


NO_USAGE: Final = Usage()


class UsageReader:
    """Reads ids and ``usage`` from an answer's bytes while they pass.

    A stream has counts in its first and last events, so only its ends are kept. A whole answer may
    have them anywhere, and is searched. All is parsed once, at the end.
    """

    __slots__ = ("_events", "_found", "_head", "_ids", "_streamed", "_tail", "_tail_bytes")

    def __init__(self, *, streamed: bool, any_id: bool = False) -> None:
        """``any_id``: whether the replica may store other things than responses."""
        self._streamed = streamed
        self._ids = _ANY_ID if any_id else _RESPONSE_ID
        self._head = bytearray()
        self._tail: list[bytes] = []
        self._tail_bytes = 0
        self._found: list[bytes] = []
        self._events = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._events += chunk.count(b"\n\n")
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        if self._tail_bytes > _MOST_TAIL_BYTES:
            self._trim()

    def _trim(self) -> None:
        body = b"".join(self._tail)
        end = len(body) - _TAIL_BYTES
        if not self._streamed:
            self._found = _ends(self._found + _usages(body, end))
        self._tail, self._tail_bytes = [body[end:]], _TAIL_BYTES

    def read(self) -> Usage:
        """Return what the bytes so far say."""
        found = _usages(self._head) if self._streamed else self._found
        found = _ends(found + _usages(b"".join(self._tail)))
        usages = [_parsed(each) for each in reversed(found)]
        stored = self._ids.search(self._head)
        return Usage(
            prompt_tokens=_prompt_count(usages),
            cached_tokens=_first_count(usages, _CACHED),
            output_tokens=_first_count(usages, _OUTPUT),
            events=self._events if self._streamed else 0,
            stored_id=stored[1].decode() if stored else None,
        )


def _usages(body: bytes | bytearray, end: int | None = None) -> list[bytes]:
    """Return the beginnings of the objects named ``usage``, of those whose names begin before
    ``end``."""
    return [
        bytes(body[found.end() : found.end() + _USAGE_BYTES])
        for found in _USAGE.finditer(body)
        if end is None or found.start() < end
    ]


def _ends(found: list[bytes]) -> list[bytes]:
    """Return the first and the last: the first event may count the prompt and the last the answer,
    and a later object of that name need not have counts."""
    return found[:1] + found[1:][-1:]


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value, _ = _DECODER.raw_decode(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _prompt_count(usages: Iterable[dict[str, Any]]) -> int | None:
    """Return a prompt's tokens; 0 does not count, which beginnings of streams tell."""
    for usage in usages:
        if found := _first_count([usage], _PROMPT):
            return found + sum(_first_count([usage], ((name,),)) or 0 for name in _OF_PROMPT)
    return None


def _first_count(
    usages: Iterable[dict[str, Any]], paths: tuple[tuple[str, ...], ...]
) -> int | None:
    for usage, path in product(usages, paths):
        value: Any = usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
