"""A proxy before one replica, for faults that signals to its process cannot make.

Without a fault it passes every byte on as it comes. A connection ends if the replica's ends.
"""

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, cast

import aiohttp
import orjson
from aiohttp import web

from bench.soak.harness import HOST
from simulator.openai_server import DONE, error_body

POISON: Final = "poison"
"""The ``user`` of a request that kills each replica that begins with it."""
COMMENT: Final = b": keep-alive\n\n"
STREAM_ERROR: Final = (
    b"data: " + error_body("the engine has failed", 500, kind="InternalServerError") + b"\n\n"
) + DONE
"""vLLM ends a stream with ``[DONE]`` after an error, too."""
RESET: Final = "connections reset"
COMMENTED: Final = "streams with comments"
COMMENTS_ONLY: Final = "streams ended after comments"
ERROR_FIRST: Final = "streams ended by an error before content"
ERROR_LATER: Final = "streams ended by an error after content"
_POISON_S: Final = 0.3
"""The replica computes for this long before it dies."""
_PAUSE_S: Final = 0.05
_REFUSES_S: Final = (0.05, 0.3)
_ACCEPTS_S: Final = (0.1, 0.6)
_MOST_EVENTS: Final = 8
_NOT_PASSED_ON: Final = frozenset(
    {"host", "connection", "keep-alive", "content-length", "transfer-encoding", "date", "server"}
)
_RESETS: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing the connection sends RST."""


class FaultyProxy:
    """Listens between `open` and `close`; at most one fault at a time."""

    def __init__(
        self, port: int, url: str, *, seed: int, poisoned: Callable[[], Awaitable[None]]
    ) -> None:
        """``url`` is the replica's. ``poisoned`` kills it, and is called for a poison request."""
        self.effects: Counter[str] = Counter()
        """How often each fault has had an effect."""
        self._port = port
        self._url = url
        self._poisoned = poisoned
        self._rng = random.Random(f"proxy {seed} {port}")
        self._thirds: Counter[str] = Counter()
        self._closes = self._flaps = self._comments = self._errors = False
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def open(self) -> None:
        """Accept connections, from now on; raise OSError."""
        if self._http is None:
            self._http = web.Server(self._handle, access_log=None, handler_cancellation=True)
        if self._listener is None:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._accepted, HOST, self._port)

    def close(self) -> None:
        """Refuse new connections, from now on; open ones stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def end_connections(self) -> None:
        """End all connections, as the kernel does when a process ends."""
        for each in () if self._http is None else self._http.connections:
            if each.transport is not None:
                each.transport.abort()

    # --- Faults

    @asynccontextmanager
    async def flapping(self) -> AsyncIterator[None]:
        """Refuse a third of the new connections, and reset a third of the others."""
        self._flaps = True
        toggling = asyncio.create_task(self._toggle())
        try:
            with self.closing():
                yield
        finally:
            self._flaps = False
            toggling.cancel()
            await asyncio.gather(toggling, return_exceptions=True)
            await self.open()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close each connection after one more answer, so that new ones are needed."""
        self._closes = True
        try:
            yield
        finally:
            self._closes = False

    @contextmanager
    def sending_comments(self) -> Iterator[None]:
        """Send comments before and between events; end some streams after comments only."""
        self._comments = True
        try:
            yield
        finally:
            self._comments = False

    @contextmanager
    def breaking_streams(self) -> Iterator[None]:
        """End most streams with an error event, before or after content."""
        self._errors = True
        try:
            yield
        finally:
            self._errors = False

    async def _toggle(self) -> None:
        while True:
            self.close()
            await asyncio.sleep(self._rng.uniform(*_REFUSES_S))
            await self.open()
            await asyncio.sleep(self._rng.uniform(*_ACCEPTS_S))

    def _accepted(self) -> asyncio.BaseProtocol:
        if self._flaps and self._is_third(RESET):
            self.effects[RESET] += 1
            return _Reset()
        assert self._http is not None
        return self._http()

    def _is_third(self, effect: str) -> bool:
        self._thirds[effect] += 1
        return self._thirds[effect] % 3 == 1

    # --- Requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        fields: dict[str, Any] = orjson.loads(body) if body else {}
        try:
            if fields.get("user") == POISON:
                await asyncio.sleep(_POISON_S)
                await self._poisoned()
            elif fields.get("stream") and (self._comments or self._errors):
                return await self._faulty_stream(request, body)
            else:
                return await self._pass_on(request, body)
        except (aiohttp.ClientError, OSError):
            pass
        if request.transport is not None:
            request.transport.abort()
        return web.Response()  # of which nothing is sent

    async def _pass_on(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        async with self._sent(request, body) as answer:
            headers = _kept(answer.headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = answer.content_length
            if self._closes:
                response.force_close()
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def _faulty_stream(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self._comments:
            await self._with_comments(request, body, response)
        else:
            await self._with_error(request, body, response)
        await response.write_eof()
        return response

    async def _with_comments(
        self, request: web.BaseRequest, body: bytes, response: web.StreamResponse
    ) -> None:
        self.effects[COMMENTED] += 1
        for _ in range(2):
            await response.write(COMMENT)
            await asyncio.sleep(_PAUSE_S)
        if self._is_third(COMMENTS_ONLY):
            self.effects[COMMENTS_ONLY] += 1
            raise ConnectionAbortedError
        async with self._sent(request, body) as answer:
            async for part, is_event in answer.content.iter_chunks():
                await response.write(part + COMMENT * is_event)

    async def _with_error(
        self, request: web.BaseRequest, body: bytes, response: web.StreamResponse
    ) -> None:
        events_left = 0 if self._is_third(ERROR_FIRST) else self._rng.randint(1, _MOST_EVENTS)
        self.effects[ERROR_LATER if events_left else ERROR_FIRST] += 1
        if events_left:
            async with self._sent(request, body) as answer:
                async for part, is_event in answer.content.iter_chunks():
                    await response.write(part)
                    events_left -= is_event
                    if not events_left:
                        break
        await response.write(STREAM_ERROR)

    @asynccontextmanager
    async def _sent(
        self, request: web.BaseRequest, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            aiohttp.ClientSession(
                auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as session,
            session.request(
                request.method,
                f"{self._url}{request.path_qs}",
                headers=_kept(request.headers),
                data=body or None,
            ) as answer,
        ):
            yield answer


class _Reset(asyncio.Protocol):
    """A connection that is reset as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast("asyncio.Transport", transport)  # uvloop's is of no class of asyncio
        made.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        made.abort()


def _kept(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON]
