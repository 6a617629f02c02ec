"""The router as an aiohttp application: what its parts are made of, and when they start."""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from router.access import Access
from router.admission import Admission, Gate
from router.config import (
    PROMPTED,
    ReplicaTlsConfig,
    RouterConfig,
    TlsConfig,
    client_context,
    load_certificate,
    server_context,
)
from router.controller import Configured, Controller
from router.cors import allow_origins
from router.feeds import Feeds, HealthMonitor
from router.fleet import Fleet, Replica
from router.http import BODIES, Bodies, announce_leaving, errors_answered
from router.lmcache import Lmcache
from router.membership import ConfigFile, Discovery, Members, Reload, Source
from router.own_endpoints import Api
from router.prompt import PromptSource
from router.proxy import METHODS, Judge, Proxy, Retries, Waits, check_passes, client_session
from router.record import Metrics, Outlets, RequestRecord
from router.replica_endpoints import ReplicaEndpoints
from router.staging import AgentClient, Preparer
from router.ui import FILES, Page, Recent

log = logging.getLogger("warmroute")

_TICK_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The router's parts while it runs, for tests and for programs that embed it."""

    fleet: Fleet
    admission: Admission
    feeds: Feeds
    health: HealthMonitor
    prompts: PromptSource
    preparer: Preparer
    judge: Judge
    waits: Waits
    retries: Retries
    proxy: Proxy
    api: Api
    replica_endpoints: ReplicaEndpoints
    page: Page
    controller: Controller | None
    """None where the configuration has none; its two applications want sites of their own."""
    lmcache: Lmcache
    members: Members
    discovery: Discovery
    reload: Reload
    tls: ssl.SSLContext | None
    """What the clients' port is to take; None for plain HTTP."""


PARTS: Final = web.AppKey("parts", Parts)


def create_app(
    config: RouterConfig,
    *,
    observe: Callable[[RequestRecord], None] | None = None,
    file: ConfigFile | None = None,
) -> web.Application:
    """Make the router; run it with ``handler_cancellation=True``.

    The replicas are asked for the first time when the application starts.
    ``observe`` hears each request's record, beside the metrics and the log. The configuration is
    read again from ``file`` whenever that changes. Raises what loading the configured tokenizer
    raises.
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
            parts = _make_parts(
                *(config, session, prompts, access),
                outlets=outlets,
                observe=observe,
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


def _make_parts(
    config: RouterConfig,
    session: aiohttp.ClientSession,
    prompts: PromptSource,
    access: Access,
    *,
    outlets: Outlets,
    observe: Callable[[RequestRecord], None] | None,
    file: ConfigFile | None,
    replica_tls: ssl.SSLContext | bool,
) -> Parts:
    fleet = Fleet(config, jitter=random.random)
    admission = Admission(Gate(fleet))
    lmcache = Lmcache(fleet, session, stock_url=config.lmcache_coordinator)
    preparer = Preparer(config, fleet, partial(AgentClient, session), lmcache=lmcache.prefetch)
    sizes = partial(_sizes, fleet, admission, lmcache)
    waits, retries = Waits(fleet, lmcache.hung), Retries()
    health = HealthMonitor(config, fleet, prompts, session, changed=waits.look)
    feeds = Feeds(fleet, session)

    def joined(replica: Replica) -> asyncio.Event:
        feeds.joined(replica)
        lmcache.joined()
        admission.wake()
        return health.joined(replica)

    def left(replica: Replica) -> None:
        health.left(replica)
        feeds.left(replica)
        lmcache.left(replica)
        preparer.left(replica)
        prompts.forget(replica.config.url)
        admission.wake()

    members = Members(fleet, drain_s=config.timeouts.drain_s, joined=joined, left=left)
    tls = None if config.tls is None else server_context(config.tls)
    live = _live(fleet, members, access, tls, replica_tls)
    reload = Reload(config, file, live)
    metrics = Metrics(
        *(fleet, sizes, lmcache.counts, access.refused, reload.counts),
        dropped=outlets.dropped,
    )
    recent = Recent(time.monotonic())
    readers = [metrics.observe, recent.observe, outlets.take, *([observe] if observe else [])]

    def record(done: RequestRecord) -> None:
        for read in readers:
            read(done)

    judge = Judge(
        config,
        fleet=fleet,
        admission=admission,
        prompts=prompts,
        preparer=preparer,
        observe=record,
        suspect=health.suspect,
        locate=lmcache.ask,
    )
    controller = _controller(config, members, session, lmcache, access)
    live["passthrough"] = partial(setattr, judge, "passthrough")
    return Parts(
        fleet=fleet,
        admission=admission,
        feeds=feeds,
        health=health,
        prompts=prompts,
        preparer=preparer,
        judge=judge,
        waits=waits,
        retries=retries,
        proxy=Proxy(judge, session, waits, retries),
        api=Api(
            config=config,
            fleet=fleet,
            judge=judge,
            counted=metrics,
            session=session,
            access=access,
            reload=reload,
        ),
        replica_endpoints=ReplicaEndpoints(fleet=fleet, look_again=health.look_again),
        controller=controller,
        page=Page(fleet=fleet, recent=recent, waiting=lambda: len(admission)),
        lmcache=lmcache,
        members=members,
        discovery=Discovery(
            config.discovery, members, None if controller is None else controller.registrations
        ),
        reload=reload,
        tls=tls,
    )


def _live(
    fleet: Fleet,
    members: Members,
    access: Access,
    tls: ssl.SSLContext | None,
    replica_tls: ssl.SSLContext | bool,
) -> dict[str, Callable[[Any], None]]:
    """Return how the settings are used that can change while the router runs."""

    def show(settings: TlsConfig | None) -> None:
        if tls is not None and settings is not None:
            load_certificate(tls, settings)

    def trust(settings: ReplicaTlsConfig) -> None:
        if isinstance(replica_tls, ssl.SSLContext) and settings.ca_file is not None:
            replica_tls.load_verify_locations(settings.ca_file)

    return {
        # First what may fail: then nothing has changed yet.
        "tls": show,
        "replica_tls": trust,
        "replicas": partial(members.name, Source.FILE),
        "access": access.change,
        "model_aliases": partial(setattr, fleet, "aliases"),
        "log_level": lambda level: logging.getLogger().setLevel(level.upper()),
    }


def _controller(
    config: RouterConfig,
    members: Members,
    session: aiohttp.ClientSession,
    lmcache: Lmcache,
    access: Access,
) -> Controller | None:
    if config.controller is None:
        return None

    def configured() -> list[Configured]:
        return [
            Configured(id=each.id, agent_url=each.config.agent_url, incarnation=each.incarnation)
            for each in members.fleet.replicas.values()
            if each.config.agent_url is not None
            if members.source(each) not in (None, Source.REGISTRATION)
        ]

    return Controller(
        configured,
        session,
        limit_bytes=config.max_body_bytes,
        body_s=config.timeouts.body_s,
        secret=config.controller.secret,
        access=access,
        beside=lmcache.routes(),
        beside_instances=lmcache.listing,
        others=None if lmcache.workers is None else lmcache.workers.control,
        guards_monitor=config.discovery.registration,
    )


def _sizes(fleet: Fleet, admission: Admission, lmcache: Lmcache) -> dict[str, int]:
    return {
        "index": len(fleet.index),
        "sessions": len(fleet.sessions),
        "waiting": len(admission),
        "lmcache": len(lmcache),
        "lmcache_workers": 0 if lmcache.workers is None else len(lmcache.workers.registry),
    }


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
        allowed = request.app[PARTS].judge.passthrough
        check_passes(request.method, request.path, request.headers, allowed)
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
