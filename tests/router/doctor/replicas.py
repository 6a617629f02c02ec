"""Stand-ins for replicas that are not as they should be, over HTTP; and what is found of them."""

import asyncio
import time
from email.utils import formatdate
from typing import Any

from aiohttp import web

from router.config.loading import router_config
from router.doctor.examination import examine
from router.doctor.findings import Level, Report


class StandIn:
    """Answers what the doctor asks of a vLLM, as it was told to."""

    def __init__(self) -> None:
        self.health = 200
        self.ahead_s = 0.0
        """How far its clock is ahead."""
        self.version: str | None = "0.32.0"
        self.models: list[dict[str, Any]] = [{"id": "m", "root": "/no/model"}]
        self.hangs = False
        """Whether ``/tokenize`` and ``/kv_event_sources`` never answer."""
        self.key: str | None = None
        """Wanted by /v1."""
        self.metrics = ""
        self.sources: dict[str, Any] = {}
        self.tokens: Any = None
        """A function from /tokenize's body to tokens; None: 404."""
        self.completion: Any = None
        """Awaited with the body of a completion; returns more members of its answer, or None."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        date = formatdate(time.time() + self.ahead_s, usegmt=True)
        return web.Response(status=self.health, headers={"Date": date})

    async def _version(self, request: web.Request) -> web.Response:
        if self.version is None:
            raise web.HTTPNotFound
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        return web.json_response({"object": "list", "data": self.models})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _sources(self, request: web.Request) -> web.Response:
        await self._hang()
        return web.json_response(self.sources)

    async def _hang(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def _tokenize(self, request: web.Request) -> web.Response:
        await self._hang()
        if self.tokens is None:
            raise web.HTTPNotFound
        tokens = self.tokens(await request.json())
        return web.json_response({"tokens": tokens, "max_model_len": 4096})

    async def _complete(self, request: web.Request) -> web.Response:
        if self.completion is None:
            raise web.HTTPInternalServerError(text="out of order")
        more = await self.completion(await request.json())
        return web.json_response({"choices": [], **(more or {})})


async def examined(
    *replicas: dict[str, Any], probe: bool = False, key: str | None = None, **settings: Any
) -> Report:
    """Examine a router.yaml of these replicas, which a slow machine's answers come in time for."""
    given = {"port": 0, "replicas": list(replicas), "timeouts": {"health_timeout_s": 60}}
    config = router_config(given | settings, path="router.yaml")
    return await examine(config, source="router.yaml", probe=probe, admin_key=key)


def found(report: Report, level: Level = Level.PROBLEM) -> dict[tuple[str, str], str]:
    """Return the findings of a level, by what they are about and their check."""
    return {
        (section.about, each.check): each.line
        for section in report.sections
        for each in section.findings
        if each.level is level
    }
