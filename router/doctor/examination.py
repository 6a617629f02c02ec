"""All checks of a configuration in their order, by the router's own parts."""

import asyncio
from typing import Any, Final

import aiohttp
import zmq.asyncio

from router.config import RouterConfig, client_context, load_fleet_secret
from router.doctor.agent_checks import check_agent
from router.doctor.event_checks import check_events
from router.doctor.findings import Report, Section, counted
from router.doctor.fleet_checks import check_fleet
from router.doctor.own_machine import (
    check_access,
    check_open_files,
    check_ports,
    running_router,
)
from router.doctor.replica_checks import Examined, Parts, check_replica
from router.doctor.token_checks import check_tokens
from router.feeds import KvFeed
from router.fleet import Fleet
from router.prompt import PromptSource
from warmroute_common.config_reader import ConfigError

_AT_ONCE: Final = 16
"""Replicas that are examined together."""


async def examine(
    config: RouterConfig, *, source: str, probe: bool = False, admin_key: str | None = None
) -> Report:
    """Examine a configuration that has loaded, and the fleet that it names.

    ``source`` is where it comes from. Nothing is changed anywhere; with ``probe`` each replica
    answers one short prompt. ``admin_key`` is the running router's.
    """
    router, whole = Section(about="the router", at=source), Section(about="the fleet")
    count = len(config.replicas)
    router.ok("file", f"the settings load: {counted(count, 'replica')}, policy {config.policy}")
    fleet = Fleet(config)
    replicas = [
        Examined(replica=each, section=Section(about=each.id, at=each.config.url))
        for each in fleet.replicas.values()
    ]
    async with _session(config) as session:
        running = await running_router(session, config, admin_key)
        _check_own(config, router, running)
        prompts = await _prompts(config, router)
        with zmq.asyncio.Context() as context:
            parts = Parts(config, fleet, session, context, prompts)
            turns = asyncio.Semaphore(_AT_ONCE)

            async def examined(seen: Examined) -> None:
                async with turns:
                    await _check(parts, seen, probe=probe)

            await asyncio.gather(*map(examined, replicas))
    _check_running(running, replicas, router)
    check_fleet(config, replicas, whole)
    return Report([router, *(each.section for each in replicas), whole])


def _session(config: RouterConfig) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=client_context(config.replica_tls))
    return aiohttp.ClientSession(connector=connector)


def _check_own(config: RouterConfig, router: Section, running: dict[str, Any] | None) -> None:
    check_ports(config, router, runs=running is not None)
    check_access(config, router)
    if running is None:
        check_open_files(config, router)


async def _prompts(config: RouterConfig, router: Section) -> PromptSource | None:
    try:
        return await asyncio.to_thread(PromptSource, config.tokenizer)
    except ConfigError as error:
        router.trouble("tokenizer", str(error))
        return None


async def _check(parts: Parts, seen: Examined, *, probe: bool) -> None:
    """Examine one replica: what does not answer is asked no more."""
    config, session = parts.config, parts.session
    is_keyed, timeout_s = bool(config.access.keys), config.timeouts.health_timeout_s
    await check_replica(session, seen, is_keyed=is_keyed, timeout_s=timeout_s)
    if not seen.answers:
        return
    feed = KvFeed(parts.fleet, seen.replica, session, parts.context)
    await check_agent(parts, seen, feed, load_fleet_secret(config))
    if parts.prompts is not None:
        await check_tokens(session, seen, parts.prompts)
    await check_events(parts, seen, feed, probe=probe)


def _check_running(
    running: dict[str, Any] | None, replicas: list[Examined], router: Section
) -> None:
    """Compare what a running router says of its replicas with what was found here."""
    if running is None:
        router.ok("running", "no router runs at its port")
        return
    told = running.get("replicas")
    if not isinstance(told, dict):
        found = f"a router runs at its port, and tells no more than '{running.get('status')}'"
        router.note("running", found, "give its admin key: --admin-key")
        return
    router.ok("running", f"a router runs at its port: {running.get('status')}")
    states = {str(each.get("url")): str(each.get("state")) for each in told.values()}
    for each in replicas:
        state = states.pop(each.config.url, None)
        if state is None:
            found = "the running router does not know it"
            each.section.trouble("running", found, "reload or restart the router with this file")
        elif each.answers and state not in ("up", "draining"):
            found = f"it answers here, and the running router says it is {state}"
            each.section.trouble("running", found, "look into the router's log")
        elif state == "draining":
            each.section.note("running", "the running router drains it: it gets nothing new")
    for url in states:
        found = f"the running router has a replica at {url}, which the file does not name"
        router.trouble("running", found, "reload or restart it with this file")
