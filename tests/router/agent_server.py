"""An agent over HTTP with the engine's part played by a few dictionaries, for tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from warmroute_common import agent_protocol as wire
from warmroute_common.keys import DEFAULT_SEED


class AgentServer:
    """Answers ``/info``, ``/snapshot``, ``/events`` and ``/prefetch`` as the wire format says."""

    def __init__(self, **info: Any) -> None:
        self.info: dict[str, Any] = {
            "instance_id": "instance1",
            "incarnation": "one",
            "model": "m",
            "hash_algorithm": "sha256",
            "hash_seed": DEFAULT_SEED,
            "block_tokens": 16,
            "chunk_tokens": 64,
            "chunk_bytes": 64_000,
            "tiers": {},
        } | info
        self.held: dict[str, list[int]] = {}
        self.oldest = 0
        self.seq = 0
        self.events: list[wire.KeyEvent] = []
        self.waits = True
        """Whether it answers only when there is news, or the time is over."""
        self.calls: list[str] = []
        self.prefetches: list[wire.PrefetchRequest] = []
        self.prefetch_reply = wire.PrefetchReply(
            resident=0, promoted=0, pending=0, missing=0, promoted_bytes=0
        )
        self.failure: int | None = None
        self.broken = False
        """Whether snapshots have keys of which the last is cut."""
        self._news = asyncio.Condition()

    async def change(self, tier: str, stored: bool, keys: Iterable[int]) -> None:
        """Have a tier gain or lose keys, and tell who waits for events."""
        keys = list(keys)
        held = self.held.setdefault(tier, [])
        self.held[tier] = [*held, *keys] if stored else [key for key in held if key not in keys]
        async with self._news:
            self.seq += 1
            self.events.append(wire.KeyEvent(tier, stored, wire.pack_keys(keys)))
            self._news.notify_all()

    async def restart(self, incarnation: str, **held: list[int]) -> None:
        """Restart with what the disk has kept."""
        async with self._news:
            self.info["incarnation"] = incarnation
            self.held, self.seq, self.events, self.oldest = dict(held), 0, [], 0
            self._news.notify_all()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/info", self._info)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_get("/events", self._events)
        app.router.add_post("/prefetch", self._prefetch)
        return app

    def _refuse(self, request: web.Request) -> None:
        self.calls.append(request.path)
        if self.failure is not None:
            raise web.HTTPInternalServerError(text="out of order")

    async def _info(self, request: web.Request) -> web.Response:
        self._refuse(request)
        return web.Response(body=msgspec.json.encode(wire.InstanceInfo(**self.info)))

    async def _snapshot(self, request: web.Request) -> web.Response:
        self._refuse(request)
        packed = {tier: wire.pack_keys(keys) for tier, keys in self.held.items()}
        if self.broken:
            packed = {tier: keys[:-1] for tier, keys in packed.items()}
        snapshot = wire.Snapshot(incarnation=self.info["incarnation"], seq=self.seq, tiers=packed)
        return web.Response(body=msgspec.msgpack.encode(snapshot))

    async def _events(self, request: web.Request) -> web.Response:
        self._refuse(request)
        after, incarnation = int(request.query["after"]), request.query["incarnation"]

        def is_gone() -> bool:
            return incarnation != self.info["incarnation"] or after < self.oldest

        with contextlib.suppress(TimeoutError):
            wait_s = float(request.query["wait_s"]) if self.waits else 0.0
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: is_gone() or self.seq > after)
        if is_gone():
            return web.json_response({"error": "gone"}, status=410)
        batch = wire.EventBatch(
            incarnation=incarnation, seq=self.seq, events=self.events[after - self.oldest :]
        )
        return web.Response(body=msgspec.msgpack.encode(batch))

    async def _prefetch(self, request: web.Request) -> web.Response:
        self._refuse(request)
        body = await request.read()
        self.prefetches.append(msgspec.json.decode(body, type=wire.PrefetchRequest))
        return web.Response(body=msgspec.json.encode(self.prefetch_reply))


@contextlib.asynccontextmanager
async def serving(app: web.Application, port: int | None = None) -> AsyncIterator[str]:
    """Serve an application for the block; gives its base URL."""
    server = TestServer(app, port=port)
    # Long polls that are under way must not hold up the end of a test.
    await server.start_server(shutdown_timeout=0.1)
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Return when something has become so."""
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110  (any state of a fleet: it signals nothing)
            await asyncio.sleep(0.005)
