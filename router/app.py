"""The router as an aiohttp application: its routes, and when its parts start and stop."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.api.access import Access
from router.api.cors import allow_origins
from router.config.credentials import client_context
from router.config.settings import RouterConfig
from router.fleet.fleet import Fleet
from router.membership.reload import ConfigFile
from router.parts import Parts, make_parts
from router.policy import METHODS, PROMPTED, Plane
from router.prompt.prompt_source import PromptSource
from router.proxy.upstream import client_session
from router.record.outlets import Outlets
from router.record.records import RecordReader
from router.ui.page import FILES
from warmroute_common.http_server import BODIES, Bodies, announce_leaving, errors_answered

log = logging.getLogger("warmroute")

_TICK_S: Final = 1.0


PARTS: Final = web.AppKey("parts", Parts)


def create_app(
    config: RouterConfig,
    *,
    reader: RecordReader | None = None,
    file: ConfigFile | None = None,
) -> web.Application:
    """Make the router; run it with ``handler_cancellation=True``.

    The replicas are asked for the first time when the application starts.
    ``reader`` gets each request's record, besides the metrics and the log. The configuration is
    read again whenever ``file`` changes. Raises what loading the configured tokenizer raises.
    """
    access = Access(config.access, open_paths=FILES.keys())
    middlewares = [errors_answered, access.guard]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[BODIES] = Bodies(within_s=config.timeouts.body_s, limit_bytes=config.max_bodies_bytes)
    announce_leaving(app)
    prompts = PromptSource(config.tokenizer)
    outlets = Outlets(config)

    async def run_parts(app: web.Application) -> AsyncIterator[None]:
        replica_tls = client_context(config.replica_tls)
        async with outlets, client_session(replica_tls) as session:
            parts = make_parts(
                *(config, session, prompts, access),
                outlets=outlets,
                reader=reader,
                file=file,
                replica_tls=replica_tls,
            )
            app[PARTS] = parts
            parts.lmcache.listen()  # first: where that fails nothing else runs yet
            await parts.health.start()
            await parts.feeds.start()
            await parts.lmcache.start()
            parts.members.start()
            parts.discovery.start()
            await parts.reload.start()
            tick = asyncio.create_task(ticking(parts.fleet), name="tick")
            yield
            tick.cancel()
            await parts.reload.stop()
            await parts.discovery.stop()
            await parts.members.stop()
            await parts.lmcache.stop()
            await parts.preparer.stop()
            await parts.feeds.stop()
            await parts.health.stop()

    async def stop_waiting(app: web.Application) -> None:
        # Half of the time for requests that still wait to be sent, half for their answers.
        loop = asyncio.get_running_loop()
        loop.call_later(config.timeouts.drain_s / 2, app[PARTS].admission.close)

    app.cleanup_ctx.append(run_parts)
    app.on_shutdown.append(stop_waiting)
    _add_routes(app)
    if config.cors is not None:
        allow_origins(app, config.cors)
    return app


async def ticking(fleet: Fleet) -> None:
    """End what time has ended, about once a second and without end."""
    while True:
        try:
            fleet.tick(time.monotonic())
        except Exception:  # one tick that fails must not be the last: nothing would expire any more
            log.exception("ending what time has ended failed")
        await asyncio.sleep(_TICK_S)


def _add_routes(app: web.Application) -> None:
    async def proxied(request: web.Request) -> web.StreamResponse:
        return await request.app[PARTS].proxy.handle(request)

    async def passed(request: web.Request) -> web.StreamResponse:
        policy = request.app[PARTS].judge.policy
        policy.check(Plane.PROXY, request.method, request.path, request.headers)
        return await proxied(request)

    def own(path: str, handler: Callable[[Parts], Handler], *methods: str) -> None:
        async def answered(request: web.Request) -> web.StreamResponse:
            if request.method not in methods:
                raise web.HTTPMethodNotAllowed(request.method, methods)
            return await handler(request.app[PARTS])(request)

        app.router.add_route("*", path, answered)

    for path in sorted(PROMPTED):
        app.router.add_post(path, proxied)
    own("/v1/models", lambda parts: parts.api.models, "GET", "HEAD")
    own("/v1/models/{model:.+}", lambda parts: parts.api.model, "GET", "HEAD")
    own("/health", lambda parts: parts.api.health, "GET", "HEAD")
    own("/metrics", lambda parts: parts.api.metrics, "GET", "HEAD")
    own("/explain", lambda parts: parts.api.explain, "POST")
    own("/replicas", lambda parts: parts.replica_endpoints.listing, "GET", "HEAD")
    own("/replicas/{id:.+}/drain", lambda parts: parts.replica_endpoints.drain, "POST")
    own("/replicas/{id:.+}/resume", lambda parts: parts.replica_endpoints.resume, "POST")
    own("/ui/state", lambda parts: parts.page.state, "GET", "HEAD")
    for path in FILES:
        own(path, lambda parts: parts.page.file, "GET", "HEAD")
    for method in METHODS:
        app.router.add_route(method, "/{path:.*}", passed)
