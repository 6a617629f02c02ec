"""Handlers of what the agent answers without changing anything."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from aiohttp import web

from cacheengine import wire
from cacheengine.agent.answers import as_json, as_msgpack, decode, number
from cacheengine.agent.async_waits import MAX_WAIT_S, wait_for_news
from cacheengine.agent.prompts import Prompts
from cacheengine.engine import CacheEngine, render_metrics
from cacheengine.transfer import TransferMeter


@dataclass(slots=True, eq=False)
class QueryHandlers:
    """``/health``, ``/info``, ``/lookup``, ``/snapshot``, ``/events`` and ``/metrics``."""

    engine: CacheEngine
    identity: wire.ReplicaIdentity
    prompts: Prompts
    meter: TransferMeter

    def routes(self) -> list[web.RouteDef]:
        """Return the paths served here."""
        return [
            web.get("/health", self.health),
            web.get("/info", self.info),
            web.post("/lookup", self.lookup),
            web.get("/snapshot", self.snapshot),
            web.get("/events", self.events),
            web.get("/metrics", self.metrics),
        ]

    async def health(self, request: web.Request) -> web.Response:
        """Say that the agent lives."""
        return web.json_response({"status": "ok"})

    async def info(self, request: web.Request) -> web.Response:
        """Say which replica this is, how its keys are made and what its tiers can do."""
        return as_json(
            wire.InstanceInfo(
                **msgspec.structs.asdict(self.identity),
                incarnation=self.engine.incarnation,
                tiers=self.engine.tier_info(),
                layout=self.engine.layout.fingerprint(),
                version=version("warmroute"),
            )
        )

    async def lookup(self, request: web.Request) -> web.Response:
        """Say how much of a prompt the tiers, or one of them, hold."""
        call = await decode(request, wire.LookupRequest)
        keys = self.prompts.keys_of(call)
        if call.tier is None:
            tiers = self.engine.match(keys)
        else:
            tiers = [call.tier] * self.engine.held_in(keys, call.tier)
        chunk_tokens = self.identity.chunk_tokens
        return as_json(
            wire.LookupReply(
                matched_tokens=len(tiers) * chunk_tokens,
                tokens_by_tier={tier: n * chunk_tokens for tier, n in Counter(tiers).items()},
                tiers=tiers,
            )
        )

    async def snapshot(self, request: web.Request) -> web.Response:
        """Tell all keys by tier."""
        # A million keys take a second to pack: not on the loop.
        snapshot = await asyncio.to_thread(self.engine.snapshot)
        return as_msgpack(snapshot)

    async def events(self, request: web.Request) -> web.Response:
        """Tell what has changed since an event, waiting for news if wanted."""
        after = number(request, "after", int, default=0)
        wait_s = min(number(request, "wait_s", float, default=0.0), MAX_WAIT_S)
        incarnation = request.query.get("incarnation", self.engine.incarnation)
        if incarnation == self.engine.incarnation:
            await wait_for_news(self.engine, after, wait_s)
            batch = self.engine.events_after(after)
            if batch is not None:
                return as_msgpack(batch)
        return web.json_response(
            {"error": f"events after {after} of {incarnation} are gone; take a new /snapshot"},
            status=410,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Give every count in Prometheus' text format."""
        text = render_metrics(self.engine, transfer=self.meter.stats())
        return web.Response(text=text, content_type="text/plain", charset="utf-8")
