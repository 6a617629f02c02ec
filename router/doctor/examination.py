"""The whole examination: the router's own machine, each replica, and the fleet together."""

import asyncio
import errno
import resource
import socket
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

import aiohttp
import zmq.asyncio

from router.config import RouterConfig, client_context, join_host_port, load_fleet_secret, reachable
from router.doctor.event_checks import check_events
from router.doctor.findings import Report, Section
from router.doctor.http_probe import NoAnswerError, get
from router.doctor.replica_checks import (
    CheckContext,
    Examined,
    check_agent,
    check_replica,
    check_tokens,
    hash_in_words,
)
from router.feeds import KvFeed
from router.fleet import Fleet
from router.prompt import PromptSource
from warmroute_common.addresses import is_loopback
from warmroute_common.agent_protocol import InstanceInfo
from warmroute_common.command_line import counted
from warmroute_common.config_reader import ConfigError

_ANSWER_S: Final = 2.0
_FILES_A_REQUEST: Final = 2
"""The connection of its client, and the one to a replica."""
_ROOM_FILES: Final = 256
"""For libraries, logs and connections to agents."""


async def running_router(
    session: aiohttp.ClientSession, config: RouterConfig, admin_key: str | None
) -> dict[str, Any] | None:
    """Return the ``/health`` of a router that runs at the configured port; None without one.

    With its admin key (or on its machine, if it has none) the answer has each replica.
    """
    scheme, host, port = "http" if config.tls is None else "https", config.host, config.port
    if config.picker is not None:
        scheme, host, port = "http", config.picker.host, config.picker.http_port
    headers = None if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
    url = f"{scheme}://{join_host_port(reachable(host), port)}/health"
    try:
        told = (await get(session, url, headers=headers, timeout_s=_ANSWER_S, verify=False)).json()
    except NoAnswerError:
        return None
    return told if isinstance(told, dict) and "first_probes" in told else None


def check_ports(config: RouterConfig, section: Section, *, runs: bool) -> None:
    """Check that each port is free, or belongs to the running router."""
    free = []
    for key, host, port in _ports(config):
        if port == 0:
            continue  # any that is free
        why = _taken(host, port)
        if why is None:
            free.append(f"{port} ({key})")
        elif not (runs and why == _IN_USE):
            fix = "stop the program that uses it, or choose another port"
            section.problem("port", f"{key}: {join_host_port(host, port)} {why}", fix)
    if free and runs:
        found = f"it does not listen on {', '.join(free)}: it was started with another file"
        section.problem("port", found, "restart it with this one")
    elif free:
        section.ok("port", f"free: {', '.join(free)}")


_IN_USE: Final = "is in use by another program"


def _ports(config: RouterConfig) -> Iterator[tuple[str, str, int]]:
    """Yield key, host and number of each configured port."""
    if config.picker is None:
        yield "port", config.host, config.port
    else:
        yield "picker.port", config.picker.host, config.picker.port
        yield "picker.http_port", config.picker.host, config.picker.http_port
    if (controller := config.controller) is not None:
        yield "controller.port", controller.host, controller.port
        yield "controller.monitor_port", controller.host, controller.monitor_port
    if (workers := config.lmcache_workers) is not None:
        for name in ("pull_port", "reply_port", "heartbeat_port"):
            host = workers.unauthenticated_host
            yield f"lmcache_workers.{name}", host, getattr(workers, name)


def _taken(host: str, port: int) -> str | None:
    """Return why a port cannot be listened on; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _IN_USE
        return f"cannot be listened on here ({error.strerror or error})"
    return None


def check_access(config: RouterConfig, section: Section) -> None:
    """Report what callers from other machines may do."""
    access = config.access
    if is_loopback(config.host):
        section.ok("access", f"listens on {config.host}: only this machine reaches it")
        return
    if not access.keys:
        found = f"listens on {config.host} without keys: every client that reaches it may use it"
        section.note("keys", found, "give clients keys: 'warmroute key NAME' makes one")
    if not access.admin_sha256:
        found = (
            f"listens on {config.host} without an admin key: /explain and /metrics answer this "
            "machine only"
        )
        section.note("admin-key", found, "'warmroute key --admin' makes one")
    if access.keys and config.tls is None:
        found = "has no tls section: clients' keys are sent unencrypted"
        section.note("tls", found, "set tls, or use a load balancer that ends TLS in front")


def check_open_files(config: RouterConfig, section: Section) -> None:
    """Check that the limit of open files allows as many requests as may wait."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return
    requests = max(0, allowed - _ROOM_FILES) // _FILES_A_REQUEST
    if requests < config.admission.max_waiting:
        found = f"{allowed} open files are allowed, enough for about {requests} requests at once"
        section.note("open-files", found, "raise the limit: ulimit -n 65536")
    else:
        section.ok("open-files", f"{allowed} open files are allowed")


_NAMED: Final = 5

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")


def check_fleet(config: RouterConfig, replicas: Sequence[Examined], section: Section) -> None:
    """Compare the replicas that answer with each other and with the file."""
    seen = [each for each in replicas if each.answers]
    if not seen:
        section.problem("up", "no replica answers: every request is refused with 503")
        return
    _check_models(config.model_aliases, seen, section)
    _check_versions(seen, section)
    _check_agents(seen, section)
    _check_stock_hashes(seen, section)
    _check_lmcache_workers(config, section)


def _check_models(aliases: Mapping[str, str], seen: Sequence[Examined], section: Section) -> None:
    telling = [each for each in seen if each.entries]
    served = set(chain.from_iterable(each.models for each in telling))
    for model in sorted(served):
        missing = [each.name for each in telling if model not in each.models]
        if missing:
            found = f"'{model}' is not served by {_listed(missing)}: its requests go to the others"
            section.note("models-differ", found)
    if len(telling) < len(seen):
        return  # what the others serve is not known
    for alias, real in aliases.items():
        if real not in served:
            found = f"model_aliases: '{alias}' stands for '{real}', which no replica serves"
            section.problem("alias", found, f"name one that is: {_listed(sorted(served))}")
        elif alias in served:
            found = f"model_aliases: '{alias}' hides a model of that name, and stands for '{real}'"
            section.note("alias", found)


def _check_versions(seen: Sequence[Examined], section: Section) -> None:
    versions = _groups((each.version, each.name) for each in seen if each.version)
    if len(versions) > 1:
        found = f"versions of vLLM differ: {_told(versions)}"
        fix = "finish the upgrade: answers and keys of KV may differ between them"
        section.problem("versions", found, fix)


def _check_agents(seen: Sequence[Examined], section: Section) -> None:
    infos = [(each.info, each.name) for each in seen if each.info is not None]
    for names in _groups((info.incarnation, name) for info, name in infos).values():
        if len(names) > 1:
            found = f"{_listed(names)} have one and the same agent"
            section.problem("agent-url", found, "give each its own agent_url")
    for model, of_model in _groups((info.model, (info, name)) for info, name in infos).items():
        _check_alike(model, of_model, section)


def _check_alike(
    model: str, replicas: Sequence[tuple[InstanceInfo, str]], section: Section
) -> None:
    """See that replicas of a model can give each other KV."""
    hashes = _groups(
        (hash_in_words(info.hash_algorithm, info.hash_seed), name) for info, name in replicas
    )
    sizes = _groups((info.chunk_tokens, name) for info, name in replicas)
    layouts = _groups((info.layout, name) for info, name in replicas)
    if len(hashes) > 1:
        found = f"hash seeds differ between replicas of '{model}': {_told(hashes)}"
        fix = (
            "start all with the same PYTHONHASHSEED and --prefix-caching-hash-algo: else none "
            "can give another its KV"
        )
        section.problem("hash-differs", found, fix)
    if len(sizes) > 1:
        found = f"chunk_size differs between replicas of '{model}': {_told(sizes)}"
        section.problem("chunk-size", found, "give all the same: else none can give another its KV")
    elif len(layouts) > 1 and len(hashes) == 1:
        apart = "; ".join(_listed(names) for names in layouts.values())
        found = f"replicas of '{model}' lay out KV differently, and can give each other none: "
        fix = "start all with the same weights, dtype, kv_cache_dtype and parallel sizes"
        section.problem("layout", found + apart, fix)
    without = [name for info, name in replicas if info.transfer_port is None]
    if len(replicas) > 1 and without:
        found = f"{_listed(without)} give other replicas no KV: they have no distributed_url"
        section.note("copies", found, "set it in the replica's file to have KV copied")


def _check_stock_hashes(seen: Sequence[Examined], section: Section) -> None:
    """Compare the hashes that KV events have shown, where there is no agent."""
    shapes = [(each.replica.shape, each.name) for each in seen if each.info is None]
    schemes = [(shape.scheme, name) for shape, name in shapes if shape is not None]
    hashes = _groups(
        (hash_in_words(scheme.algorithm, scheme.seed), name)
        for scheme, name in schemes
        if scheme is not None
    )
    if len(hashes) > 1:
        found = f"hash seeds differ: {_told(hashes)}; the router hashes each prompt for each"
        section.note("hash-differs", found, "start all with the same PYTHONHASHSEED")


def _check_lmcache_workers(config: RouterConfig, section: Section) -> None:
    workers = config.lmcache_workers
    if workers is None or workers.pre_caching_hash_algorithm != "builtin":
        return
    unknown = [
        each.name for each in config.replicas if each.agent_url is None and each.hash_seed is None
    ]
    if unknown:
        found = f"LMCache's builtin hash needs the hash_seed of {_listed(unknown)}"
        fix = "set PYTHONHASHSEED there, and hash_seed in the file, to the same number"
        section.problem("lmcache-hash", found, fix)


def _groups(pairs: Iterable[tuple[_Key, _T]]) -> dict[_Key, list[_T]]:
    """Return what belongs to each key, in the order of its first."""
    found: dict[_Key, list[_T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _told(groups: Mapping[_Key, Sequence[str]]) -> str:
    return "; ".join(f"{key} ({_listed(names)})" for key, names in groups.items())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


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
            parts = CheckContext(config, fleet, session, context, prompts)
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
        router.problem("tokenizer", str(error))
        return None


async def _check(parts: CheckContext, seen: Examined, *, probe: bool) -> None:
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
            each.section.problem("running", found, "reload or restart the router with this file")
        elif each.answers and state not in ("up", "draining"):
            found = f"it answers here, and the running router says it is {state}"
            each.section.problem("running", found, "look into the router's log")
        elif state == "draining":
            each.section.note("running", "the running router drains it: it gets nothing new")
    for url in states:
        found = f"the running router has a replica at {url}, which the file does not name"
        router.problem("running", found, "reload or restart it with this file")
