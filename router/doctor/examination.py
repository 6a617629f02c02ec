"""All checks: the router's own machine, each replica, and the fleet as a whole."""

import asyncio
import errno
import resource
import socket
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, Final, TypeVar

import aiohttp

from router.config.credentials import client_context, load_fleet_secret
from router.config.settings import DECODING_ROLES, PREFILLING_ROLES, RouterConfig
from router.doctor.event_checks import check_events
from router.doctor.findings import Report, Section
from router.doctor.http_probe import ProbeError, get
from router.doctor.replica_checks import (
    CheckContext,
    Examined,
    check_agent,
    check_nixl,
    check_pulls,
    check_replica,
    check_tokens,
    hash_in_words,
)
from router.feeds.feeds import KvFeed
from router.feeds.kv_receiver import KvReceiver
from router.feeds.replica_answers import served_models
from router.fleet.fleet import Fleet
from router.prompt.prompt_source import PromptSource
from warmroute_common.addresses import is_loopback, join_host_port, reachable
from warmroute_common.admin_token import admin_token_headers
from warmroute_common.agent_protocol import InstanceInfo
from warmroute_common.command_line import counted
from warmroute_common.config_reader import ConfigError

_ANSWER_S: Final = 2.0
_MOST_ANSWER_S: Final = 10.0
"""For calls without a limit of their own: aiohttp's default is 5 minutes."""
_FILES_PER_REQUEST: Final = 2
"""A client's connection and the one to a replica."""
_RESERVED_FILES: Final = 256
"""For libraries, logs and connections to agents."""


async def running_router(
    session: aiohttp.ClientSession, config: RouterConfig, admin_key: str | None
) -> dict[str, Any] | None:
    """Return the ``/health`` of the router that runs at the configured port, or None.

    With an admin key, or with the token of a router of this user, the answer names each replica.
    """
    scheme, host, port = "http" if config.tls is None else "https", config.host, config.port
    if config.picker is not None:
        scheme, host, port = "http", config.picker.host, config.picker.http_port
    url = f"{scheme}://{join_host_port(reachable(host), port)}/health"
    bearer = None if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
    headers = bearer or await asyncio.to_thread(admin_token_headers, url)
    try:
        answer = await get(session, url, headers=headers, timeout_s=_ANSWER_S, verify=False)
    except ProbeError:
        return None
    health = answer.json()
    return health if isinstance(health, dict) and "first_probes" in health else None


def check_ports(config: RouterConfig, section: Section, *, runs: bool) -> None:
    """Check that each port is free, or belongs to the running router."""
    free = []
    for key, host, port in _ports(config):
        if port == 0:
            continue  # the router then picks a free one
        why = _taken(host, port)
        if why is None:
            free.append(f"{port} ({key})")
        elif not (runs and why == _IN_USE):
            fix = "stop the program that uses it, or choose another port"
            section.problem("port", f"{key}: {join_host_port(host, port)} {why}", fix)
    if free and runs:
        found = f"it does not listen on {', '.join(free)}: it was started with another file"
        section.problem("port", found, "restart it with this file")
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
    """Return why a port cannot be listened on, or None."""
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
            f"listens on {config.host} without an admin key: /explain and /metrics answer only "
            "the user who runs the router"
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
    requests = max(0, allowed - _RESERVED_FILES) // _FILES_PER_REQUEST
    if requests < config.admission.max_waiting:
        found = f"{allowed} open files are allowed, enough for about {requests} requests at once"
        section.note("open-files", found, "raise the limit: ulimit -n 65536")
    else:
        section.ok("open-files", f"{allowed} open files are allowed")


_MAX_NAMES: Final = 5

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")


def check_fleet(config: RouterConfig, replicas: Sequence[Examined], section: Section) -> None:
    """Compare the replicas that answer with each other and with the file."""
    seen = [each for each in replicas if each.answers]
    if not seen:
        section.problem("up", "no replica answers: every request is refused with 503")
        return
    _check_models(config.model_aliases, seen, section)
    _check_contexts(seen, section)
    _check_versions(seen, section)
    _check_agents(seen, section)
    _check_stock_hashes(seen, section)
    _check_lmcache_workers(config, section)
    _check_nixl_pairs(seen, section)


def _check_models(aliases: Mapping[str, str], seen: Sequence[Examined], section: Section) -> None:
    listed = [each for each in seen if each.entries]
    served = set(chain.from_iterable(each.models for each in listed))
    for model in sorted(served):
        missing = [each.name for each in listed if model not in each.models]
        if missing:
            names = _joined(missing)
            found = f"'{model}' is not served by {names}: its requests go to the other replicas"
            section.note("models-differ", found)
    if len(listed) < len(seen):
        return  # some replicas' models are not known
    for alias, real in aliases.items():
        if real not in served:
            found = f"model_aliases: '{alias}' stands for '{real}', which no replica serves"
            section.problem("alias", found, f"use one of {_joined(sorted(served))}")
        elif alias in served:
            found = f"model_aliases: '{alias}' stands for '{real}', and hides a model of that name"
            section.note("alias", found)


def _check_contexts(seen: Sequence[Examined], section: Section) -> None:
    lengths = _groups(
        (each.id, (each.max_model_len, one.name))
        for one in seen
        for each in served_models(one.entries or [])
        if each.max_model_len is not None
    )
    for model, told in lengths.items():
        if len(contexts := _groups(told)) > 1:
            found = f"contexts of '{model}' differ in tokens: {_described(contexts)}"
            section.note("context", f"{found}; long prompts go only to replicas that take them")


def _check_versions(seen: Sequence[Examined], section: Section) -> None:
    versions = _groups((each.version, each.name) for each in seen if each.version)
    if len(versions) > 1:
        found = f"versions of vLLM differ: {_described(versions)}"
        fix = "finish the upgrade: answers and KV keys may differ between versions"
        section.problem("versions", found, fix)


def _check_agents(seen: Sequence[Examined], section: Section) -> None:
    infos = [(each.info, each.name) for each in seen if each.info is not None]
    for names in _groups((info.incarnation, name) for info, name in infos).values():
        if len(names) > 1:
            found = f"{_joined(names)} have the same agent"
            section.problem("agent-url", found, "give each its own agent_url")
    for model, of_model in _groups((info.model, (info, name)) for info, name in infos).items():
        _check_alike(model, of_model, section)


def _check_alike(
    model: str, replicas: Sequence[tuple[InstanceInfo, str]], section: Section
) -> None:
    """Check that replicas of a model can copy KV from each other."""
    hashes = _groups(
        (hash_in_words(info.hash_algorithm, info.hash_seed), name) for info, name in replicas
    )
    sizes = _groups((info.chunk_tokens, name) for info, name in replicas)
    layouts = _groups((info.layout, name) for info, name in replicas)
    if len(hashes) > 1:
        found = f"hash seeds differ between replicas of '{model}': {_described(hashes)}"
        fix = (
            "start all with the same PYTHONHASHSEED and --prefix-caching-hash-algo: otherwise KV "
            "cannot be copied between them"
        )
        section.problem("hash-differs", found, fix)
    if len(sizes) > 1:
        found = f"chunk_size differs between replicas of '{model}': {_described(sizes)}"
        fix = "set the same value everywhere: otherwise KV cannot be copied between them"
        section.problem("chunk-size", found, fix)
    elif len(layouts) > 1 and len(hashes) == 1:
        groups = "; ".join(_joined(names) for names in layouts.values())
        found = f"replicas of '{model}' differ in their KV layout, so KV cannot be copied: "
        fix = "start all with the same weights, dtype, kv_cache_dtype and parallel sizes"
        section.problem("layout", found + groups, fix)
    without = [name for info, name in replicas if info.transfer_port is None]
    if len(replicas) > 1 and without:
        found = f"no KV can be copied from {_joined(without)}: distributed_url is not set there"
        section.note("copies", found, "set it in the replica's file")


def _check_stock_hashes(seen: Sequence[Examined], section: Section) -> None:
    """Compare the hashes of replicas without an agent, as their KV events have shown them."""
    shapes = [(each.replica.shape, each.name) for each in seen if each.info is None]
    schemes = [(shape.scheme, name) for shape, name in shapes if shape is not None]
    hashes = _groups(
        (hash_in_words(scheme.algorithm, scheme.seed), name)
        for scheme, name in schemes
        if scheme is not None
    )
    if len(hashes) > 1:
        found = (
            f"hash seeds differ: {_described(hashes)}; the router hashes each prompt once for each"
        )
        section.note("hash-differs", found, "start all with the same PYTHONHASHSEED")


def _check_lmcache_workers(config: RouterConfig, section: Section) -> None:
    workers = config.lmcache_workers
    if workers is None or workers.pre_caching_hash_algorithm != "builtin":
        return
    unknown = [
        each.name for each in config.replicas if each.agent_url is None and each.hash_seed is None
    ]
    if unknown:
        found = f"LMCache's builtin hash needs the hash_seed of {_joined(unknown)}"
        fix = "set PYTHONHASHSEED there, and hash_seed in the file, to the same number"
        section.problem("lmcache-hash", found, fix)


def _check_nixl_pairs(seen: Sequence[Examined], section: Section) -> None:
    """Check that each replica with a ``nixl_role`` has another one for the other side."""
    models = {each.name: {*each.models, *each.roots} for each in seen}
    prefill = {each.name for each in seen if each.config.nixl_role in PREFILLING_ROLES}
    decode = {each.name for each in seen if each.config.nixl_role in DECODING_ROLES}
    for names, others, does, other in (
        (prefill, decode, "prefill for", "decode"),
        (decode, prefill, "decode for", "prefill"),
    ):
        alone = sorted(
            name
            for name in names
            if not any(models[name] & models[each] for each in others - {name})
        )
        if alone:
            found = (
                f"nixl_role: {_joined(alone)} can {does} no replica: none of its model can {other}"
            )
            fix = f"set nixl_role to both or {other} at another replica of the same model"
            section.problem("nixl-pairs", found, fix)


def _groups(pairs: Iterable[tuple[_Key, _T]]) -> dict[_Key, list[_T]]:
    """Return the values of each key, in their order."""
    found: dict[_Key, list[_T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _described(groups: Mapping[_Key, Sequence[str]]) -> str:
    return "; ".join(f"{key} ({_joined(names)})" for key, names in groups.items())


def _joined(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


_CONCURRENT: Final = 16
"""Replicas that are examined at the same time."""


async def examine(
    config: RouterConfig, *, source: str, probe: bool = False, admin_key: str | None = None
) -> Report:
    """Check a configuration that has loaded, and its fleet. Changes nothing.

    ``source`` names the configuration's file. With ``probe`` each replica answers one short prompt.
    ``admin_key`` is that of the running router.
    """
    router, whole = Section(about="the router", at=source), Section(about="the fleet")
    count = len(config.replicas)
    router.ok("file", f"the settings load: {counted(count, 'replica')}, policy {config.policy}")
    fleet = Fleet(config)
    replicas = [
        Examined(replica=each, section=Section(about=each.id, at=each.config.public_url))
        for each in fleet.replicas.values()
    ]
    async with _session(config) as session:
        running = await running_router(session, config, admin_key)
        _check_own(config, router, running)
        prompts = await _prompts(config, router)
        async with aclosing(KvReceiver()) as receiver:
            parts = CheckContext(config, fleet, session, receiver, prompts)
            turns = asyncio.Semaphore(_CONCURRENT)

            async def examined(seen: Examined) -> None:
                async with turns:
                    await _check(parts, seen, probe=probe)

            await asyncio.gather(*map(examined, replicas))
    _check_running(running, replicas, router)
    check_fleet(config, replicas, whole)
    return Report([router, *(each.section for each in replicas), whole])


def _session(config: RouterConfig) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=client_context(config.replica_tls))
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=_MOST_ANSWER_S)
    )


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
    """Check one replica; if it does not answer, the further checks are skipped."""
    config, session = parts.config, parts.session
    is_keyed, timeout_s = bool(config.access.keys), config.timeouts.health_timeout_s
    await check_replica(session, seen, is_keyed=is_keyed, timeout_s=timeout_s)
    if not seen.answers:
        return
    feed = KvFeed(parts.fleet, seen.replica, session, parts.receiver)
    secret = load_fleet_secret(config)
    await check_agent(parts, seen, feed, secret)
    if parts.prompts is not None:
        await check_tokens(session, seen, parts.prompts, secret)
    await check_events(parts, seen, feed, probe=probe)
    if probe and seen.config.nixl_role is not None:
        await check_nixl(session, seen)
    if seen.config.nixl_role in DECODING_ROLES:
        await check_pulls(session, seen, timeout_s)


def _check_running(
    running: dict[str, Any] | None, replicas: list[Examined], router: Section
) -> None:
    """Compare a running router's view of its replicas with the findings."""
    if running is None:
        router.ok("running", "no router runs at its port")
        return
    known = running.get("replicas")
    if not isinstance(known, dict):
        found = f"a router runs at its port ({running.get('status')}), but hides its replicas"
        router.note("running", found, "give its admin key with --admin-key")
        return
    router.ok("running", f"a router runs at its port: {running.get('status')}")
    faults = running.get("faults")
    for about, why in faults.items() if isinstance(faults, dict) else ():
        router.problem("running", f"the running router: {about}: {why}")
    states = {str(each.get("url")): str(each.get("state")) for each in known.values()}
    for each in replicas:
        state = states.pop(each.config.public_url, None)
        if state is None:
            found = "the running router does not know it"
            each.section.problem("running", found, "reload or restart the router with this file")
        elif each.answers and state not in ("up", "draining"):
            found = f"it answers here, but the running router says that it is {state}"
            each.section.problem("running", found, "see the router's log")
        elif state == "draining":
            each.section.note("running", "the running router drains it: it gets no new requests")
    for url in states:
        found = f"the running router has a replica at {url}, which is not in the file"
        router.problem("running", found, "reload or restart it with this file")
