"""A scripted agent that speaks the real wire format."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web

from warmroute_common.agent_protocol import (
    EventBatch,
    InstanceInfo,
    PrefetchReply,
    PrefetchRequest,
    Snapshot,
    TierInfo,
    pack_keys,
)
from warmroute_common.keys import HashScheme, chunk_keys, key64

BLOCK: Final = 16


CHUNK: Final = 64


PROMPT: Final = list(range(1000))


CHUNKS: Final = chunk_keys(HashScheme().chain(PROMPT, BLOCK), CHUNK // BLOCK)


@dataclass
class Agent:
    """An agent whose replica holds the prompt's chunks on disk."""

    url: str = ""
    chunks: list[bytes] = field(default_factory=lambda: CHUNKS)
    asked: list[PrefetchRequest] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None
    status: int = 200

    async def info(self, request: web.Request) -> web.Response:
        disk = TierInfo(capacity_bytes=1 << 30, used_bytes=0, read_bytes_per_s=1e9)
        info = InstanceInfo(
            instance_id="one",
            incarnation="first",
            model="m",
            hash_algorithm="sha256",
            hash_seed=HashScheme().seed,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            chunk_bytes=CHUNK * 1000,
            tiers={"cpu": disk, "disk": disk},
        )
        return web.Response(body=msgspec.json.encode(info))

    async def snapshot(self, request: web.Request) -> web.Response:
        keys = pack_keys(map(key64, self.chunks))
        snapshot = Snapshot(incarnation="first", seq=0, tiers={"disk": keys})
        return web.Response(body=msgspec.msgpack.encode(snapshot))

    async def events(self, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response(
            body=msgspec.msgpack.encode(EventBatch(incarnation="first", seq=0, events=[]))
        )

    async def prefetch(self, request: web.Request) -> web.Response:
        self.asked.append(msgspec.json.decode(await request.read(), type=PrefetchRequest))
        self.arrived.set()
        if self.gate is not None:
            await self.gate.wait()
        count = len(self.asked[-1].keys)
        reply = PrefetchReply(
            resident=0, promoted=count - 1, pending=1, missing=0, promoted_bytes=count
        )
        return web.Response(body=msgspec.json.encode(reply), status=self.status)


@asynccontextmanager
async def running_agent() -> AsyncIterator[Agent]:
    agent = Agent()
    app = web.Application()
    app.router.add_get("/info", agent.info)
    app.router.add_get("/snapshot", agent.snapshot)
    app.router.add_get("/events", agent.events)
    app.router.add_post("/prefetch", agent.prefetch)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield agent
    finally:
        await runner.cleanup()


ASK: Final[dict[str, Any]] = {"model": "m", "prompt": PROMPT}
