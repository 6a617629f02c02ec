"""The router as an aiohttp application: its parts, its routes, and when the parts start and stop.

`make_parts` says what each part is made of, and which of them tells which.
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from router.agent_client import AgentClient
from router.api.access import IS_ADMITTED, Access
from router.api.cors import allow_origins
from router.api.own_endpoints import OwnEndpoints
from router.api.replica_endpoints import ReplicaEndpoints
from router.config.credentials import (
    client_context,
    load_certificate,
    load_fleet_secret,
    server_context,
)
from router.config.settings import ReplicaTlsConfig, RouterConfig, TlsConfig
from router.faults import FaultReport
from router.feeds.feeds import Feeds
from router.feeds.health_monitor import HealthMonitor
from router.feeds.replica_answers import authorization
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from router.fleet.scaling import Scaling
from router.lmcache.controller import Controller
from router.lmcache.instance_registry import ConfiguredInstance
from router.lmcache.lmcache import Lmcache
from router.membership.discovery import Discovery
from router.membership.membership import Membership, Source
from router.membership.reload import ConfigFile, Reload
from router.policy import METHODS, PROMPTED
from router.prompt.prompt_source import PromptSource
from router.prompt.replica_tokenizer import TokenizingReplica
from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.proxy import Proxy, Retries
from router.proxy.upstream import client_session
from router.record.metrics import Metrics
from router.record.records import RecordReader, RecordReaders
from router.record.request_log import RecordExports
from router.record.usage_totals import UsageTotals
from router.scheduling.admission import AdmissionController, AdmissionQueue
from router.scheduling.request_scheduler import RequestScheduler
from router.staging.stager import Stager
from router.ui.page import FILES, Page
from router.ui.recent import Recent
from router.waste.uncached_causes import UncachedCauses
from router.waste.waste import Waste
from warmroute_common.addresses import is_loopback
from warmroute_common.api_errors import ApiError
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.http_server import (
    BODIES,
    Bodies,
    announce_leaving,
    errors_answered,
    expect_later,
    send_request_ids,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The router's parts while it runs, for tests and for programs that embed it."""

    fleet: Fleet
    faults: FaultReport
    admission: AdmissionController
    feeds: Feeds
    health: HealthMonitor
    prompts: PromptSource
    stager: Stager
    lifecycle: RequestLifecycle
    waits: FirstByteWaits
    retries: Retries
    proxy: Proxy
    api: OwnEndpoints
    replica_endpoints: ReplicaEndpoints
    page: Page
    controller: Controller | None
    """None where the configuration has none; its two applications want sites of their own."""
    lmcache: Lmcache
    members: Membership
    discovery: Discovery
    reload: Reload
    tls: ssl.SSLContext | None
    """What the clients' port is to take; None for plain HTTP."""


@dataclass(frozen=True, kw_only=True)
class _Followers:
    """The parts that keep something for each replica."""

    health: HealthMonitor
    feeds: Feeds
    lmcache: Lmcache
    stager: Stager
    prompts: PromptSource
    admission: AdmissionController

    def joined(self, replica: Replica) -> asyncio.Event:
        """Begin to follow a replica; return an event that its first probe sets."""
        self.feeds.joined(replica)
        self.lmcache.joined()
        self.admission.wake()
        return self.health.joined(replica)

    def left(self, replica: Replica) -> None:
        """Forget a replica."""
        self.health.left(replica)
        self.feeds.left(replica)
        self.lmcache.left(replica)
        self.stager.left(replica)
        self.prompts.forget(replica.config.url)
        self.admission.wake()


def make_parts(
    config: RouterConfig,
    session: aiohttp.ClientSession,
    prompts: PromptSource,
    access: Access,
    *,
    exports: RecordExports,
    reader: RecordReader | None,
    file: ConfigFile | None,
    replica_tls: ssl.SSLContext | bool,
) -> Parts:
    """Make the parts, none of which has started yet.

    ``replica_tls`` is what ``session`` verifies replicas by. Raises what loading certificates does.
    """
    fleet = Fleet(config, jitter=random.random)
    scheduler = RequestScheduler(fleet, stopwatch=time.monotonic)
    admission = AdmissionController(AdmissionQueue(scheduler), time.monotonic)
    lmcache = Lmcache(fleet, session)
    secret = load_fleet_secret(config)
    agents = partial(AgentClient, session, secret=secret)
    stager = Stager(config, fleet, agents, lmcache=lmcache.prefetch)
    recent = Recent(time.monotonic())
    usage_totals = UsageTotals()
    causes = UncachedCauses(fleet) if config.uncached_causes else None
    wasted = None if causes is None else Waste(time.monotonic())
    scaling = Scaling(fleet, admission, config.scaling.decode_slots)
    waits, retries = FirstByteWaits(fleet, lmcache), Retries()

    def changed() -> None:
        waits.look()
        admission.wake()

    health = HealthMonitor(config, fleet, prompts, session, agents=agents, changed=changed)
    feeds = Feeds(fleet, session, secret)
    followers = _Followers(
        health=health,
        feeds=feeds,
        lmcache=lmcache,
        stager=stager,
        prompts=prompts,
        admission=admission,
    )
    members = Membership(fleet, drain_s=config.timeouts.drain_s, followers=followers)
    tls = None if config.tls is None else server_context(config.tls)
    optional = [each for each in (wasted, reader) if each is not None]
    records = RecordReaders([recent, exports, usage_totals, *optional])
    lifecycle = RequestLifecycle(
        config,
        fleet=fleet,
        scheduler=scheduler,
        admission=admission,
        prompts=prompts,
        stager=stager,
        records=records,
        health=health,
        locator=lmcache,
        causes=causes,
    )
    reload = Reload(
        config, file, _live(fleet, members, access, lifecycle, tls=tls, replica_tls=replica_tls)
    )
    prompts.ask_replicas(session, partial(_tokenizing_replicas, fleet))
    tables: dict[str, Sized | None] = {
        "index": fleet.index,
        "sessions": fleet.sessions,
        "output_lengths": fleet.output_lengths,
        "waiting": admission,
        "recent_requests": recent,
        "usage": usage_totals,
        "departed_keys": fleet.index.departed,
        "last_prompts": None if causes is None else causes.last_prompts,
        "waste": wasted,
        "lmcache": lmcache,
        "lmcache_workers": None if lmcache.workers is None else lmcache.workers.registry,
    }
    metrics = Metrics(
        *(fleet, partial(_sizes, tables), lmcache.counts, access.refused, reload.counts),
        dropped=exports.dropped,
        inexact=prompts.inexact,
        asked=prompts.replica_tokenizer,
        kv_behind_s=feeds.kv_behind_s,
        scaling=scaling,
        usage=usage_totals,
    )
    records.add(metrics)
    faults = FaultReport(fleet, prompts)
    controller = _controller(config, members, session, lmcache, access, secret=secret)
    return Parts(
        fleet=fleet,
        faults=faults,
        admission=admission,
        feeds=feeds,
        health=health,
        prompts=prompts,
        stager=stager,
        lifecycle=lifecycle,
        waits=waits,
        retries=retries,
        proxy=Proxy(lifecycle, session, waits, retries),
        api=OwnEndpoints(
            config=config,
            fleet=fleet,
            health_checks=health,
            lifecycle=lifecycle,
            counted=metrics,
            usage_totals=usage_totals,
            session=session,
            access=access,
            reload=reload,
            faults=faults,
            loads=scaling,
            wasted=wasted,
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
    members: Membership,
    access: Access,
    lifecycle: RequestLifecycle,
    *,
    tls: ssl.SSLContext | None,
    replica_tls: ssl.SSLContext | bool,
) -> dict[str, Callable[[Any], None]]:
    """Return a function for each live setting that applies its new value."""

    def show(settings: TlsConfig | None) -> None:
        if tls is not None and settings is not None:
            load_certificate(tls, settings)

    def trust(settings: ReplicaTlsConfig) -> None:
        if isinstance(replica_tls, ssl.SSLContext) and settings.ca_file is not None:
            replica_tls.load_verify_locations(settings.ca_file)

    def rename(aliases: Mapping[str, str]) -> None:
        fleet.aliases = lifecycle.policy.aliases = aliases

    return {
        # Steps that may fail come first: then nothing has changed yet.
        "tls": show,
        "replica_tls": trust,
        "replicas": partial(members.name, Source.FILE),
        "access": access.change,
        "model_aliases": rename,
        "passthrough": partial(setattr, lifecycle.policy, "passthrough"),
        "log_level": lambda level: logging.getLogger().setLevel(level.upper()),
    }


def _controller(
    config: RouterConfig,
    members: Membership,
    session: aiohttp.ClientSession,
    lmcache: Lmcache,
    access: Access,
    *,
    secret: FleetSecret | None,
) -> Controller | None:
    if config.controller is None:
        return None
    others_reach_it = not is_loopback(config.controller.host)

    def configured() -> list[ConfiguredInstance]:
        return [
            ConfiguredInstance(
                id=each.id, agent_url=each.config.agent_url, incarnation=each.incarnation
            )
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
        fleet_secret=secret,
        lmcache=lmcache,
        guards_monitor=config.discovery.registration or others_reach_it,
    )


def _tokenizing_replicas(fleet: Fleet) -> list[TokenizingReplica]:
    """Return the replicas that may be asked for a prompt's tokens."""
    return [
        TokenizingReplica(
            url=each.config.url,
            load=each.in_flight + each.others_waiting + each.others_running,
            headers=authorization(each.config),
        )
        for each in fleet.replicas.values()
        if each.state is ReplicaState.UP and not (each.is_held_off or each.is_overdue)
    ]


def _sizes(tables: Mapping[str, Sized | None]) -> dict[str, int]:
    return {name: 0 if table is None else len(table) for name, table in tables.items()}


log = logging.getLogger("warmroute")

_TICK_S: Final = 1.0


PARTS: Final = web.AppKey("parts", Parts)


@web.middleware
async def _refusals_recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record a request that `Access.guard` refuses; `Proxy` records what was admitted."""
    try:
        return await handler(request)
    except ApiError as error:
        if IS_ADMITTED not in request:
            request.app[PARTS].proxy.refuse(request, error)
        raise


def create_app(
    config: RouterConfig,
    *,
    reader: RecordReader | None = None,
    file: ConfigFile | None = None,
    admin_token: str | None = None,
    picks: bool = False,
) -> web.Application:
    """Make the router; run it with ``handler_cancellation=True``.

    The replicas are asked for the first time when the application starts.
    ``reader`` gets each request's record, besides the metrics and the log. The configuration is
    read again whenever ``file`` changes. ``admin_token`` counts as an admin key.
    ``picks``: a gateway carries the requests, so none is forwarded from here.
    Raises what loading the configured tokenizer raises.
    """
    access = Access(config.access, open_paths=FILES.keys(), admin_token=admin_token)
    middlewares = [errors_answered, _refusals_recorded, access.guard]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[BODIES] = Bodies(within_s=config.timeouts.body_s, limit_bytes=config.max_bodies_bytes)
    announce_leaving(app)
    app.on_response_prepare.append(access.show_limits)
    send_request_ids(app)
    prompts = PromptSource(config.tokenizer)
    exports = RecordExports(config)

    async def run_parts(app: web.Application) -> AsyncIterator[None]:
        replica_tls = client_context(config.replica_tls)
        async with exports, client_session(replica_tls) as session, AsyncExitStack() as stack:
            parts = make_parts(
                *(config, session, prompts, access),
                exports=exports,
                reader=reader,
                file=file,
                replica_tls=replica_tls,
            )
            app[PARTS] = parts
            await _start(parts, stack)
            yield

    async def stop_waiting(app: web.Application) -> None:
        # Half of the time for requests that still wait to be sent, half for their answers.
        loop = asyncio.get_running_loop()
        loop.call_later(config.timeouts.drain_s / 2, app[PARTS].admission.close)

    app.cleanup_ctx.append(run_parts)
    app.on_shutdown.append(stop_waiting)
    _add_own_routes(app)
    if not picks:
        _add_forwarded_routes(app)
    if config.cors is not None:
        allow_origins(app, config.cors)
    return app


async def _start(parts: Parts, stack: AsyncExitStack) -> None:
    """Start the parts; ``stack`` stops them in reverse order, also when a start fails."""
    parts.lmcache.listen()  # first: where that fails nothing else runs yet
    stack.push_async_callback(parts.health.stop)
    await parts.health.start()
    stack.push_async_callback(parts.feeds.stop)
    await parts.feeds.start()
    stack.push_async_callback(parts.stager.stop)
    stack.push_async_callback(parts.lmcache.stop)
    await parts.lmcache.start()
    stack.push_async_callback(parts.members.stop)
    parts.members.start()
    stack.push_async_callback(parts.discovery.stop)
    parts.discovery.start()
    stack.push_async_callback(parts.reload.stop)
    await parts.reload.start()
    tick = asyncio.create_task(ticking(parts.fleet, parts.faults), name="tick")
    stack.callback(tick.cancel)


async def ticking(fleet: Fleet, faults: FaultReport) -> None:
    """End what time has ended and look for faults, about once a second and without end."""
    is_full = False
    while True:
        try:
            fleet.tick(time.monotonic())
            if fleet.index.evicted and not is_full:
                is_full = True
                log.warning(
                    "the prefix index is full (%d keys): KV that replicas hold is no longer "
                    "matched; raise index.max_keys",
                    fleet.index.max_keys,
                )
            faults.look(time.monotonic())
        except Exception:  # one tick that fails must not be the last: nothing would expire any more
            log.exception("ending what time has ended failed")
        await asyncio.sleep(_TICK_S)


def _add_forwarded_routes(app: web.Application) -> None:
    """Add what replicas answer; after the router's own routes, which go first."""

    async def proxied(request: web.Request) -> web.StreamResponse:
        return await request.app[PARTS].proxy.handle(request)

    async def passed(request: web.Request) -> web.StreamResponse:
        return await request.app[PARTS].proxy.pass_through(request)

    for path in sorted(PROMPTED):
        app.router.add_post(path, proxied, expect_handler=expect_later)
    _own(app, "/v1/models", lambda parts: parts.api.models, "GET", "HEAD")
    _own(app, "/v1/models/{model:.+}", lambda parts: parts.api.model, "GET", "HEAD")
    for method in METHODS:
        app.router.add_route(method, "/{path:.*}", passed, expect_handler=expect_later)


def _add_own_routes(app: web.Application) -> None:
    _own(app, "/health", lambda parts: parts.api.health, "GET", "HEAD")
    _own(app, "/metrics", lambda parts: parts.api.metrics, "GET", "HEAD")
    _own(app, "/usage", lambda parts: parts.api.usage, "GET", "HEAD")
    _own(app, "/explain", lambda parts: parts.api.explain, "POST")
    _own(app, "/scaling", lambda parts: parts.api.scaling, "GET", "HEAD")
    _own(app, "/waste", lambda parts: parts.api.waste, "GET", "HEAD")
    _own(app, "/replicas", lambda parts: parts.replica_endpoints.listing, "GET", "HEAD")
    _own(app, "/replicas/{id:.+}/drain", lambda parts: parts.replica_endpoints.drain, "POST")
    _own(app, "/replicas/{id:.+}/resume", lambda parts: parts.replica_endpoints.resume, "POST")
    _own(app, "/requests/{id:.+}", lambda parts: parts.page.request, "GET", "HEAD")
    _own(app, "/ui/state", lambda parts: parts.page.state, "GET", "HEAD")
    for path in FILES:
        _own(app, path, lambda parts: parts.page.file, "GET", "HEAD")


def _own(
    app: web.Application, path: str, handler: Callable[[Parts], Handler], *methods: str
) -> None:
    async def answered(request: web.Request) -> web.StreamResponse:
        if request.method not in methods:
            raise web.HTTPMethodNotAllowed(request.method, methods)
        return await handler(request.app[PARTS])(request)

    app.router.add_route("*", path, answered, expect_handler=expect_later)
