"""What the agent answers without changing anything."""

import asyncio
from importlib.metadata import version

from aiohttp import web

from cacheengine import wire
from cacheengine.agent.answers import as_json, as_msgpack, decode, number
from cacheengine.agent.identity import AgentIdentity
from cacheengine.agent.prompts import Prompts
from cacheengine.agent.waiting import MAX_WAIT_S, wait_for_news
from cacheengine.engine import CacheEngine, render_metrics
from cacheengine.transfer import TransferMeter


class Reading:
    """Handlers of ``/health``, ``/info``, ``/lookup``, ``/snapshot``, ``/events``, ``/metrics``."""

    def __init__(
        self,
        engine: CacheEngine,
        identity: AgentIdentity,
        prompts: Prompts,
        meter: TransferMeter,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._prompts = prompts
        self._meter = meter

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
        """Say who the replica is, how its keys are made and what its tiers can do."""
        identity = self._identity
        return as_json(
            wire.InstanceInfo(
                instance_id=identity.instance_id,
                incarnation=self._engine.incarnation,
                model=identity.model,
                hash_algorithm=identity.hash_algorithm,
                hash_seed=identity.hash_seed,
                block_tokens=identity.block_tokens,
                chunk_tokens=identity.chunk_tokens,
                chunk_bytes=identity.chunk_bytes,
                tiers=self._engine.tier_info(),
                kv_events_port=identity.kv_events_port,
                kv_replay_port=identity.kv_replay_port,
                transfer_port=identity.transfer_port,
                layout=self._engine.layout.fingerprint(),
                version=version("warmroute"),
            )
        )

    async def lookup(self, request: web.Request) -> web.Response:
        """Say how much of a prompt the tiers, or one of them, hold."""
        call = await decode(request, wire.LookupRequest)
        keys = self._prompts.keys_of(call)
        if call.tier is None:
            tiers = self._engine.match(keys)
        else:
            tiers = [call.tier] * self._engine.held_in(keys, call.tier)
        by_tier: dict[str, int] = {}
        for tier in tiers:
            by_tier[tier] = by_tier.get(tier, 0) + self._identity.chunk_tokens
        return as_json(
            wire.LookupReply(
                matched_tokens=len(tiers) * self._identity.chunk_tokens,
                tokens_by_tier=by_tier,
                tiers=tiers,
            )
        )

    async def snapshot(self, request: web.Request) -> web.Response:
        """Tell all keys by tier."""
        # A million keys take a second to pack: not on the loop.
        snapshot = await asyncio.to_thread(self._engine.snapshot)
        return as_msgpack(snapshot)

    async def events(self, request: web.Request) -> web.Response:
        """Tell what has changed since an event, waiting for news if wanted."""
        after = number(request, "after", int, default=0)
        wait_s = min(number(request, "wait_s", float, default=0.0), MAX_WAIT_S)
        incarnation = request.query.get("incarnation", self._engine.incarnation)
        if incarnation == self._engine.incarnation:
            await wait_for_news(self._engine, after, wait_s)
            batch = self._engine.events_after(after)
            if batch is not None:
                return as_msgpack(batch)
        return web.json_response(
            {"error": f"events after {after} of {incarnation} are gone; take a new /snapshot"},
            status=410,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Give every count in Prometheus' text format."""
        text = render_metrics(self._engine, transfer=self._meter.stats())
        return web.Response(text=text, content_type="text/plain", charset="utf-8")
