"""Scripted upstreams: real HTTP servers whose every answer a test has written."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict

from warmroute_common.tasks import end_all

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request as the upstream got it."""

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes


@dataclass
class Scripted:
    """An upstream: `will` says what comes, `seen` what came."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["m"])
    entries: list[dict[str, object]] | None = None
    """What ``/v1/models`` lists, where ``models`` do not suffice."""
    listings: int = 0
    """How often ``/v1/models`` was asked."""
    metrics: str = ""
    """What ``/metrics`` says; ``{looks}`` in it: how often that was asked."""
    looks: int = 0
    standstill: dict[str, bool] | None = None
    """What ``/is_sleeping`` and ``/is_paused`` say, by the name of the field; None: 404."""
    healthy: bool = True
    probe_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """``/health`` answers while this is set, as it is at first."""
    silent: bool = False
    """Whether ``/health`` is taken and not answered."""
    unanswered: int = 0
    """How often that was."""
    seen: list[Seen] = field(default_factory=list)
    script: deque[Act] = field(default_factory=deque)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has gone before the end of its answer."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def will(self, *acts: Act) -> None:
        """Answer the next requests so, one act each; the last one stays."""
        self.script = deque(acts)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(
            Seen(
                method=request.method,
                path=request.path_qs,
                headers=CIMultiDict(request.headers),
                body=await request.read(),
            )
        )
        self.arrived.set()
        act = self.script.popleft() if len(self.script) > 1 else self.script[0]
        try:
            return await act(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted.set()
            raise

    async def health(self, request: web.Request) -> web.Response:
        if self.silent:
            self.unanswered += 1
            await asyncio.Event().wait()
        await self.probe_gate.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def absent(self, request: web.Request) -> web.Response:
        return web.Response(status=404)

    async def tell_standstill(self, request: web.Request) -> web.Response:
        if self.standstill is None:
            return web.Response(status=404)
        name = request.path.removeprefix("/")
        return web.json_response({name: self.standstill.get(name, False)})

    async def tell_metrics(self, request: web.Request) -> web.Response:
        self.looks += 1
        return web.Response(text=self.metrics.replace("{looks}", str(self.looks)))

    async def list_models(self, request: web.Request) -> web.Response:
        self.listings += 1
        models = self.entries or [
            {"id": name, "object": "model", "owned_by": "test"} for name in self.models
        ]
        return web.json_response({"object": "list", "data": models})


@asynccontextmanager
async def scripted(*, port: int = 0) -> AsyncIterator[Scripted]:
    """Run an upstream on a free port."""
    upstream = Scripted()
    upstream.will(json_answer({"ok": True}))
    upstream.probe_gate.set()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/health", upstream.health)
    app.router.add_get("/metrics", upstream.tell_metrics)
    app.router.add_get("/v1/models", upstream.list_models)
    for asked_by_the_router in ("/version", "/kv_event_sources"):
        app.router.add_get(asked_by_the_router, upstream.absent)
    for path in ("/is_sleeping", "/is_paused"):
        app.router.add_get(path, upstream.tell_standstill)
    app.router.add_route("*", "/{path:.*}", upstream.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield upstream
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Answer each connection once, by its bytes, then close it; yield the URL.

    At the end all connections are closed, also those whose answers are not: a connection that
    outlives its event loop fails whichever test runs when it is collected.
    """
    answering: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await answer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            answering.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2 << 20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await end_all(list(answering))


def json_answer(value: object, *, status: int = 200, **headers: str) -> Act:
    async def act(request: web.Request) -> web.Response:
        return web.json_response(value, status=status, headers=headers)

    return act


async def cut_before_headers(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def stream(
    *pieces: bytes,
    cut: bool = False,
    content_type: str = "text/event-stream",
    gates: tuple[asyncio.Event | None, ...] = (),
) -> Act:
    """Send ``pieces``, each after its gate if it has one, then end or break off."""

    async def act(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for index, piece in enumerate(pieces):
            gate = gates[index] if index < len(gates) else None
            if gate is not None:
                await gate.wait()
            await response.write(piece)
        if cut:
            # Abort once what was written is on its way, not before.
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write_eof()
        return response

    return act


def chat_events(*words: str) -> tuple[bytes, ...]:
    """Return the SSE events of a streamed chat completion that says ``words``."""
    chunks = [
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
        }
        for word in words
    ]
    events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return (*events, b"data: [DONE]\n\n")


CHAT_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}
