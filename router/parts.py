"""The parts of one router: what each is made of, and which of them tells which."""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from router.agent_client import AgentClient
from router.api.access import Access
from router.api.own_endpoints import OwnEndpoints
from router.api.replica_endpoints import ReplicaEndpoints
from router.config.credentials import load_certificate, load_fleet_secret, server_context
from router.config.settings import ReplicaTlsConfig, RouterConfig, TlsConfig
from router.feeds.feeds import Feeds
from router.feeds.health_monitor import HealthMonitor
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.lmcache.controller import Controller
from router.lmcache.instance_registry import ConfiguredInstance
from router.lmcache.lmcache import Lmcache
from router.membership.discovery import Discovery
from router.membership.membership import Membership, Source
from router.membership.reload import ConfigFile, Reload
from router.prompt.prompt_source import PromptSource
from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.proxy import Proxy
from router.proxy.retries import Retries
from router.record.metrics import Metrics
from router.record.outlets import Outlets
from router.record.records import RecordReader, RecordReaders
from router.scheduling.admission import AdmissionController, AdmissionQueue
from router.scheduling.request_scheduler import RequestScheduler
from router.staging.stager import Stager
from router.ui.page import Page
from router.ui.recent import Recent
from warmroute_common.addresses import is_loopback
from warmroute_common.fleet_secret import FleetSecret


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The router's parts while it runs, for tests and for programs that embed it."""

    fleet: Fleet
    admission: AdmissionController
    feeds: Feeds
    health: HealthMonitor
    prompts: PromptSource
    preparer: Stager
    judge: RequestLifecycle
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


def make_parts(
    config: RouterConfig,
    session: aiohttp.ClientSession,
    prompts: PromptSource,
    access: Access,
    *,
    outlets: Outlets,
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
    preparer = Stager(config, fleet, agents, lmcache=lmcache.prefetch)
    sizes = partial(_sizes, fleet, admission, lmcache)
    waits, retries = FirstByteWaits(fleet, lmcache), Retries()
    health = HealthMonitor(config, fleet, prompts, session, changed=waits.look)
    feeds = Feeds(fleet, session, secret)

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

    members = Membership(fleet, drain_s=config.timeouts.drain_s, joined=joined, left=left)
    tls = None if config.tls is None else server_context(config.tls)
    recent = Recent(time.monotonic())
    records = RecordReaders([recent, outlets, *([] if reader is None else [reader])])
    judge = RequestLifecycle(
        config,
        fleet=fleet,
        scheduler=scheduler,
        admission=admission,
        prompts=prompts,
        preparer=preparer,
        records=records,
        failures=health,
        locator=lmcache,
    )
    reload = Reload(
        config, file, _live(fleet, members, access, judge, tls=tls, replica_tls=replica_tls)
    )
    metrics = Metrics(
        *(fleet, sizes, lmcache.counts, access.refused, reload.counts),
        dropped=outlets.dropped,
    )
    records.add(metrics)
    controller = _controller(config, members, session, lmcache, access, secret=secret)
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
        api=OwnEndpoints(
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
    members: Membership,
    access: Access,
    judge: RequestLifecycle,
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
        fleet.aliases = judge.policy.aliases = aliases

    return {
        # Steps that may fail come first: then nothing has changed yet.
        "tls": show,
        "replica_tls": trust,
        "replicas": partial(members.name, Source.FILE),
        "access": access.change,
        "model_aliases": rename,
        "passthrough": partial(setattr, judge.policy, "passthrough"),
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


def _sizes(fleet: Fleet, admission: AdmissionController, lmcache: Lmcache) -> dict[str, int]:
    return {
        "index": len(fleet.index),
        "sessions": len(fleet.sessions),
        "waiting": len(admission),
        "lmcache": len(lmcache),
        "lmcache_workers": 0 if lmcache.workers is None else len(lmcache.workers.registry),
    }
