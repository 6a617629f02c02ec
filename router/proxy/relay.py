"""Passing a replica's answer to the client as it comes.

A stream that the replica breaks off does not look complete to the client: SSE clients get an error
event, others see the connection close before the announced end.
"""

import asyncio
import json
import re
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Self

from aiohttp import web

from router.api.access import IS_TENANT
from router.fleet.replica import Replica
from router.proxy.upstream import AnswerCutError, ReplicaAnswer
from router.record.records import Outcome, RequestRecord, answer_headers
from warmroute_common.api_errors import UpstreamFailedError
from warmroute_common.http_server import error_body, is_anthropic

_HEAD_BYTES: Final = 4 << 10
_TAIL_BYTES: Final = 16 << 10
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
_DECODER: Final = json.JSONDecoder()


async def relay(
    request: web.Request,
    answer: ReplicaAnswer,
    *,
    reader: "UsageReader",
    record: RequestRecord,
    replica: Replica,
    idle_s: float | None,
) -> web.StreamResponse:
    """Stream ``answer`` to the client; note in ``record`` how it ended.

    Each chunk proves that ``replica`` is alive. If nothing moves for ``idle_s``, the answer is cut
    (the replica sends nothing) or the client's connection is ended (the client reads nothing).
    Raises ConnectionResetError when the client has left.
    """
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.headers.update(answer_headers(record, is_tenant=request.get(IS_TENANT, False)))
    await response.prepare(request)
    record.status = answer.status
    last = b""
    try:
        with IdleTimer(request, answer, idle_s) as idle:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    idle.is_writing = True
                    idle.moved_s = replica.heard_s = time.monotonic()
                    reader.feed(chunk)
                    await response.write(chunk)
                    record.response_bytes += len(chunk)
                    last = chunk
                    idle.is_writing = False
                    idle.moved_s = time.monotonic()
    except AnswerCutError as cut:
        record.end(Outcome.CUT, error=str(cut))
        await _end_cut(request, response, answer, last)
        return response
    await response.write_eof()
    record.end(Outcome.OK)
    return response


async def _end_cut(
    request: web.Request, response: web.StreamResponse, answer: ReplicaAnswer, last: bytes
) -> None:
    if not answer.streamed or "Content-Encoding" in answer.headers:
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
        return
    error = UpstreamFailedError("the replica's answer broke off; the text so far is incomplete")
    # An event cut in half would swallow this one: end it first.
    gap = b"" if last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    name = b"event: error\n" if is_anthropic(request.path) else b""
    await response.write(gap + name + b"data: " + error_body(request.path, error) + b"\n\n")
    await response.write_eof()


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
    stored_id: str | None = None
    """The id of what the replica stores: a response, for a later ``previous_response_id``, or a
    file."""


NO_USAGE: Final = Usage()


class UsageReader:
    """Reads ids and ``usage`` from an answer's bytes while they pass.

    It keeps only the first and last few KB and parses them once, at the end: in every
    API that is proxied, an id comes first and ``usage`` last.
    """

    __slots__ = ("_head", "_ids", "_tail", "_tail_bytes")

    def __init__(self, *, any_id: bool = False) -> None:
        """``any_id``: whether the replica may store other things than responses."""
        self._ids = _ANY_ID if any_id else _RESPONSE_ID
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def read(self) -> Usage:
        """Return what the bytes so far say."""
        usage = _last_usage(b"".join(self._tail)[-_TAIL_BYTES:])
        found = self._ids.search(self._head)
        return Usage(
            prompt_tokens=_prompt_count(usage),
            cached_tokens=_first_count(usage, _CACHED),
            output_tokens=_first_count(usage, _OUTPUT),
            stored_id=found[1].decode() if found else None,
        )


def _last_usage(tail: bytes) -> dict[str, Any]:
    matches = list(_USAGE.finditer(tail))
    if not matches:
        return {}
    text = tail[matches[-1].end() :].decode(errors="replace")
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _prompt_count(usage: dict[str, Any]) -> int | None:
    """Return a prompt's tokens; None for 0, which beginnings of streams tell."""
    found = _first_count(usage, _PROMPT)
    return (found or None) and found + sum(
        _first_count(usage, ((name,),)) or 0 for name in _OF_PROMPT
    )


def _first_count(usage: dict[str, Any], paths: tuple[tuple[str, ...], ...]) -> int | None:
    for path in paths:
        value: Any = usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
