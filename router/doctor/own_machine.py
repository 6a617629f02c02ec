"""What the router needs of the machine that it runs on: ports, open files; and whom it lets in."""

import errno
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final

import aiohttp

from router.config import RouterConfig, join_host_port, reachable
from router.doctor.asking import NoAnswerError, get
from router.doctor.findings import Section
from warmroute_common.addresses import is_loopback

_ANSWER_S: Final = 2.0
_FILES_A_REQUEST: Final = 2
"""Its client's connection, and that to a replica."""
_ROOM_FILES: Final = 256
"""Libraries, logs, connections to agents."""


async def running_router(
    session: aiohttp.ClientSession, config: RouterConfig, admin_key: str | None
) -> dict[str, Any] | None:
    """Return what a router that runs at the configured port says at ``/health``, None if none does.

    With its admin key (or on its machine, where it has none) it tells of each replica.
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
    """See that each port is free, or the running router's."""
    free = []
    for key, host, port in _ports(config):
        if port == 0:
            continue  # any that is free
        why = _taken(host, port)
        if why is None:
            free.append(f"{port} ({key})")
        elif not (runs and why == _IN_USE):
            mend = "end the program that has it, or choose another port"
            section.trouble("port", f"{key}: {join_host_port(host, port)} {why}", mend)
    if free and runs:
        found = f"it has no {', no '.join(free)}: it was started with another file"
        section.trouble("port", found, "restart it with this one")
    elif free:
        section.ok("port", f"free: {', '.join(free)}")


_IN_USE: Final = "is in use by another program"


def _ports(config: RouterConfig) -> Iterator[tuple[str, str, int]]:
    """Yield the key, the host and the number of each port that is not chosen freely."""
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
    """Return why a port cannot be listened on; None where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _IN_USE
        return f"cannot be listened on here ({error.strerror or error})"
    return None


def check_access(config: RouterConfig, section: Section) -> None:
    """Tell what callers from other machines may do."""
    access = config.access
    if is_loopback(config.host):
        section.ok("access", f"listens on {config.host}: only this machine reaches it")
        return
    if not access.keys:
        found = f"asks for no key while it listens on {config.host}: whoever reaches it may use it"
        section.note("keys", found, "give clients keys: 'warmroute key NAME' makes one")
    if not access.admin_sha256:
        found = (
            "has no admin key while it listens on "
            f"{config.host}: /explain and /metrics answer this machine alone"
        )
        section.note("admin-key", found, "'warmroute key --admin' makes one")
    if access.keys and config.tls is None:
        found = "has no tls section: clients' keys travel unencrypted"
        section.note("tls", found, "set tls, or have a load balancer in front that speaks it")


def check_open_files(config: RouterConfig, section: Section) -> None:
    """See that as many requests can be under way as the configuration lets wait."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return
    requests = max(0, allowed - _ROOM_FILES) // _FILES_A_REQUEST
    if requests < config.admission.max_waiting:
        found = f"{allowed} open files are allowed, enough for about {requests} requests at once"
        section.note("open-files", found, "raise it where more may come: ulimit -n 65536")
    else:
        section.ok("open-files", f"{allowed} open files are allowed")
