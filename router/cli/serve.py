"""Running the router or the picker until a signal stops it."""

import asyncio
import ctypes
import errno
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

import uvloop
from aiohttp import web

from router.app import PARTS, Parts, create_app
from router.config.settings import PickerConfig, RouterConfig, TimeoutsConfig
from router.lmcache.controller import Controller
from router.membership.reload import ConfigFile, Reload
from warmroute_common.addresses import is_loopback, join_host_port, listening_family
from warmroute_common.admin_token import (
    new_admin_token,
    remove_admin_token,
    write_admin_token,
)
from warmroute_common.command_line import counted
from warmroute_common.config_reader import describe
from warmroute_common.http_server import LEAVING, Site
from warmroute_common.log_format import JsonLogFormatter, LogFormatter

log = logging.getLogger("warmroute")

SWITCH_INTERVAL_S: Final = 0.001
"""After this time a thread gives Python's lock to the event loop. While the metrics of 200 replicas
are rendered the loop then has 1.7 times as many turns as with Python's default of 0.005."""
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BLOCK_BYTES: Final = 256 << 10
_CONTROLLER_DRAIN_S: Final = 1.0
_FEW_FILES: Final = 8192
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_LEAVE_S: Final = 5.0
"""Time that Kubernetes and common load balancers need to stop sending requests."""


class PortTakenError(Exception):
    """A port cannot be listened on; ``key`` is its setting."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def run(config: RouterConfig, *, file: ConfigFile | None = None, picks: bool = False) -> None:
    """Serve until SIGINT or SIGTERM, then leave and drain; raise `PortTakenError`.

    ``file`` is read again whenever it changes, and on SIGHUP. ``picks``: run as the endpoint picker
    of a gateway.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLogFormatter()
        if config.log_format == "json"
        else LogFormatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    )
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    _check_ports(config, picks=picks)
    _raise_file_limit()
    return_large_memory()
    uvloop.run(_serve(config, file, picks=picks))


def return_large_memory() -> None:
    """Let the C library return large blocks to the system as soon as they are freed.

    By default (glibc) it keeps blocks of up to 32 MiB once some were freed, in each thread's heap,
    and has to copy what grows. Elsewhere this does nothing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: each connection is one file."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than their hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        limit = most
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        log.warning(
            "the process may open only %d files, and each connection of a client or to a replica "
            "is one: raise the limit (ulimit -n) to %d or more",
            limit,
            _FEW_FILES,
        )


def _check_ports(config: RouterConfig, *, picks: bool) -> None:
    """Raise `PortTakenError` before any replica is contacted."""
    picker, controller = config.picker or PickerConfig(), config.controller
    ports = [("port", config.host, config.port)]
    if picks:
        ports = [
            ("picker.port", picker.host, picker.port),
            ("picker.http_port", picker.host, picker.http_port),
        ]
    if controller is not None:
        ports += [
            ("controller.port", controller.host, controller.port),
            ("controller.monitor_port", controller.host, controller.monitor_port),
        ]
    for key, host, port in ports:
        try:
            # As servers do: a port whose last owner has just ended is free.
            with socket.socket(listening_family(host, port)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            raise _port_taken(error, host, port, key) from None


def _port_taken(error: OSError, host: str, port: int, key: str) -> PortTakenError:
    is_used = error.errno == errno.EADDRINUSE
    why = "is already in use" if is_used else f"cannot be listened on ({error.strerror})"
    return PortTakenError(key, f"{join_host_port(host, port)} {why}")


async def _serve(config: RouterConfig, file: ConfigFile | None, *, picks: bool) -> None:
    token = new_admin_token()
    app = create_app(config, file=file, admin_token=token, picks=picks)
    stop = _stop_signal()
    async with AsyncExitStack() as stack:
        runner = await _setup(app, config.timeouts.drain_s, stack)
        _exempt_from_collection()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        controller = app[PARTS].controller
        # First: who waits for the router's log line finds the controller running too.
        if controller is not None:
            await _serve_controller(controller, config, stack)
        publish = partial(_publish, token, stack)
        if picks:
            leave = await _serve_picker(app[PARTS], runner, publish, stack)
            host = (config.picker or PickerConfig()).host
        else:
            leave, host = None, config.host
            await _serve_clients(runner, config, app[PARTS].tls, publish)
        if file is not None:
            _read_again_on_hangup(app[PARTS].reload)
        number = await stop
        app[LEAVING].has_begun = True
        if leave is not None:
            await leave()
        await _leave(0.0 if number is signal.SIGINT else leave_s(config.timeouts, host))
        log.info("stopping: running requests have %g s to finish", config.timeouts.drain_s)


def _publish(token: str, stack: AsyncExitStack, port: int) -> None:
    """Write the admin token for this user's commands; ``stack`` removes the file at the end."""
    try:
        path = write_admin_token(token, port)
    except OSError as error:
        log.warning(
            "the admin token cannot be written (%s): commands such as 'warmroute top' need "
            "--admin-key",
            describe(error),
        )
        return
    stack.callback(remove_admin_token, path, token)
    log.info("this user's commands, and /ui, are admitted by the admin token in %s", path)


def _exempt_from_collection() -> None:
    """Exempt all objects that exist now from garbage collection.

    Each full collection halts all requests; the modules alone take 30 to 50 ms of it.
    """
    gc.collect()
    gc.freeze()


async def _leave(seconds: float) -> None:
    """Give load balancers time to notice, while requests are still accepted."""
    if seconds > 0:
        log.info("leaving: /health answers 503; requests are accepted for %g s more", seconds)
        await asyncio.sleep(seconds)


def leave_s(timeouts: TimeoutsConfig, host: str) -> float:
    """Return how long a router that listens on ``host`` accepts requests after SIGTERM."""
    if timeouts.leave_s is not None:
        return timeouts.leave_s
    return 0.0 if is_loopback(host) else _LEAVE_S


async def _serve_picker(
    parts: Parts, runner: web.AppRunner, publish: Callable[[int], None], stack: AsyncExitStack
) -> Callable[[], Awaitable[None]]:
    """Listen; return the function that declares the picker not ready."""
    # Its packages are an extra that only gateways need.
    from router.gateway.picker_server import CannotListenError, PickerServer  # noqa: PLC0415

    config = parts.lifecycle.config
    settings = config.picker or PickerConfig()
    # Clients' TLS ends at the gateway.
    url = await _listen(runner, config, settings.host, settings.http_port, "picker.http_port")
    publish(runner.addresses[0][1])
    picker = PickerServer(parts.lifecycle, settings)
    parts.members.listeners.append(picker.fleet_changed)
    try:
        port = await picker.start()
    except CannotListenError as error:
        raise PortTakenError(error.key, describe(error)) from None
    stack.push_async_callback(picker.stop, config.timeouts.drain_s)
    log.info(
        "picking one of %s at %s (policy %s); own endpoints at %s",
        counted(len(config.replicas), "replica"),
        join_host_port(settings.host, port),
        config.policy,
        url,
    )
    return picker.leave


async def _serve_clients(
    runner: web.AppRunner,
    config: RouterConfig,
    tls: ssl.SSLContext | None,
    publish: Callable[[int], None],
) -> None:
    url = await _listen(runner, config, config.host, config.port, "port", tls=tls)
    publish(runner.addresses[0][1])
    log.info(
        "serving %s at %s (policy %s); clients use OPENAI_BASE_URL=%s/v1",
        counted(len(config.replicas), "replica"),
        url,
        config.policy,
        url.replace("//0.0.0.0", f"//{socket.gethostname()}"),
    )
    if not config.access.keys and not is_loopback(config.host):
        log.warning(
            "access.keys is empty: every client that reaches %s may use the router; 'warmroute key "
            "NAME' makes a key",
            url,
        )


async def _serve_controller(
    controller: Controller, config: RouterConfig, stack: AsyncExitStack
) -> None:
    settings = config.controller
    assert settings is not None
    urls = []
    for app, port, key in (
        (controller.api(), settings.port, "controller.port"),
        (controller.monitor(), settings.monitor_port, "controller.monitor_port"),
    ):
        runner = await _setup(app, _CONTROLLER_DRAIN_S, stack)
        # Replicas and LMCache servers speak plain HTTP to it.
        urls.append(await _listen(runner, config, settings.host, port, key))
    log.info("the controller's API is at %s; replicas register at %s", *urls)


async def _setup(app: web.Application, drain_s: float, stack: AsyncExitStack) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        # A client that disconnects cancels its handler, and with it the request to the replica.
        handler_cancellation=True,
        shutdown_timeout=drain_s,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner


async def _listen(
    runner: web.AppRunner,
    config: RouterConfig,
    host: str,
    port: int,
    key: str,
    *,
    tls: ssl.SSLContext | None = None,
) -> str:
    """Listen, and return the base URL; raise `PortTakenError`."""
    site = Site(runner, host, port, idle_s=config.timeouts.idle_s, tls=tls)
    try:
        await site.start()
    except OSError as error:
        raise _port_taken(error, host, port, key) from None
    host, port = runner.addresses[0][:2]
    return f"http{'s' if tls else ''}://{join_host_port(host, port)}"


def _read_again_on_hangup(reload: Reload) -> None:
    reading: set[asyncio.Task[None]] = set()

    def on_hangup() -> None:
        task = asyncio.create_task(reload.now(), name="configuration")
        reading.add(task)
        task.add_done_callback(reading.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)


def _stop_signal() -> asyncio.Future[signal.Signals]:
    """Return a future of the first SIGINT or SIGTERM; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)
        for each in _STOPS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in _STOPS:
        loop.add_signal_handler(number, on_signal, number)
    return stop
