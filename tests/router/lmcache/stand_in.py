"""An LMCache server whose every answer a test has in hand, in the words of a real one's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.router.agent_server import serving
from tests.router.lmcache.told import CHUNK, MODEL


@dataclass
class StandIn:
    """A server of lmcache 0.5.6, as far as the router asks it."""

    instance_id: str = "mp0"
    hash_algorithm: str = "blake3"
    found: int | None = None
    """Chunks that a prefetch finds; None: all."""
    refusal: int | None = None
    """What a prefetch is answered with instead."""
    error: str = ""
    """Why its L2 deletes nothing."""
    gate: asyncio.Event | None = None
    """Until when a prefetch is pending."""
    registered: bool = True
    """Whether its vLLM has told it of its model."""
    busy: asyncio.Event | None = None
    """Until when it does not answer whether it is well."""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[dict[str, Any]] = field(default_factory=list)
    polled: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/config", self.config)
        app.router.add_get("/status", self.status)
        app.router.add_get("/healthcheck", self.health)
        app.router.add_post("/cache/prefetches", self.prefetch)
        app.router.add_get("/cache/prefetches/{id}", self.poll)
        app.router.add_delete("/cache/objects", self.delete)
        return app

    async def config(self, request: web.Request) -> web.Response:
        return web.json_response({"mp": {"instance_id": self.instance_id, "chunk_size": CHUNK}})

    async def status(self, request: web.Request) -> web.Response:
        contexts = {"1": {"model_name": MODEL, "world_size": 1}} if self.registered else {}
        return web.json_response(
            {
                "is_healthy": True,
                "chunk_size": CHUNK,
                "hash_algorithm": self.hash_algorithm,
                "cache_context_meta": {**contexts, "2": None},
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        if self.busy is not None:
            await self.busy.wait()
        return web.json_response({"status": "healthy"})

    async def prefetch(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.refusal is not None:
            return web.json_response({"detail": "no layout registered"}, status=self.refusal)
        chunks = len(body["token_ids"]) // CHUNK
        if not chunks:
            return web.json_response({"chunks": 0, "status": "noop"}, status=202)
        told = {"request_id": f"job{chunks}", "chunks": chunks, "status": "submitted"}
        return web.json_response(told, status=202)

    async def delete(self, request: web.Request) -> web.Response:
        if self.refusal is not None:
            return web.json_response({"detail": "no L2 adapters configured"}, status=self.refusal)
        self.deleted.append(await request.json())
        answer: dict[str, Any] = {
            "deleted": len(self.deleted[-1]["keys"]),
            "skipped": 0,
            "ok": True,
        }
        if self.error:
            answer |= {"deleted": 0, "ok": False, "error": self.error}
        return web.json_response(answer)

    async def poll(self, request: web.Request) -> web.Response:
        self.polled += 1
        name = request.match_info["id"]
        if not name.startswith("job"):
            return web.json_response({"detail": "no such job"}, status=404)
        if self.gate is not None and not self.gate.is_set():
            return web.json_response({"request_id": name, "status": "pending"})
        total = int(name.removeprefix("job"))
        found = total if self.found is None else min(total, self.found)
        told = {"request_id": name, "status": "completed", "found_keys": found}
        return web.json_response({**told, "total_keys": total})


@asynccontextmanager
async def standing_in(server: StandIn) -> AsyncIterator[StandIn]:
    """Serve it for the block."""
    async with serving(server.app()) as server.url:
        yield server
