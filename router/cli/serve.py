"""Running the router until it is told to stop."""

import asyncio
import errno
import gc
import logging
import resource
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

import uvloop
from aiohttp import web

from router.app import PARTS, create_app
from router.config import PickerConfig, RouterConfig, TimeoutsConfig, join_host_port
from router.lmcache import Controller
from router.membership import ConfigFile, Reload
from router.parts import Parts
from warmroute_common.addresses import is_loopback
from warmroute_common.config_reader import describe
from warmroute_common.http_server import LEAVING, Site

log = logging.getLogger("warmroute")

_CONTROLLER_DRAIN_S: Final = 1.0
_FEW_FILES: Final = 8192
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_LEAVE_S: Final = 5.0
"""As long as Kubernetes and common load balancers need to send nothing more."""


class PortTakenError(Exception):
    """An address cannot be listened on; ``key`` is its port's in the configuration."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def run(config: RouterConfig, *, file: ConfigFile | None = None, picks: bool = False) -> None:
    """Serve until SIGINT or SIGTERM, then leave and drain; raise `PortTakenError`.

    The configuration is read again from ``file`` on SIGHUP, and whenever that changes. ``picks``:
    behind a gateway, as its endpoint picker.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)s %(message)s",
    )
    _raise_file_limit()
    uvloop.run(_serve(config, file, picks=picks))


def _raise_file_limit() -> None:
    """Let the process open as many files as it may: each connection is one."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        limit = most
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        log.warning(
            "the process may open %d files only, and needs one for each connection of a client "
            "and one for each to a replica: raise its limit (ulimit -n) to %d or more",
            limit,
            _FEW_FILES,
        )


async def _serve(config: RouterConfig, file: ConfigFile | None, *, picks: bool) -> None:
    app = create_app(config, file=file)
    stop = _stop_signal()
    async with AsyncExitStack() as stack:
        runner = await _setup(app, config.timeouts.drain_s, stack)
        _keep_for_good()
        controller = app[PARTS].controller
        # First: a program that waits for the router's line finds the controller there too.
        if controller is not None:
            await _serve_controller(controller, config, stack)
        if picks:
            leave = await _serve_picker(app[PARTS], runner, stack)
            host = (config.picker or PickerConfig()).host
        else:
            leave, host = None, config.host
            await _serve_clients(runner, config, app[PARTS].tls)
        if file is not None:
            _read_again_on_hangup(app[PARTS].reload)
        number = await stop
        app[LEAVING].has_begun = True
        if leave is not None:
            await leave()
        await _leave(0.0 if number is signal.SIGINT else leave_s(config.timeouts, host))
        log.info("stopping: running requests may take %g s more", config.timeouts.drain_s)


def _keep_for_good() -> None:
    """Have the garbage collector look no more at what is there by now: modules, classes, parts.

    Each full collection halts all requests, and the modules alone are 30 to 50 ms of it.
    """
    gc.collect()
    gc.freeze()


async def _leave(seconds: float) -> None:
    """Let load balancers notice, while requests are still taken."""
    if seconds > 0:
        log.info("leaving: requests are still taken for %g s, and /health says 503", seconds)
        await asyncio.sleep(seconds)


def leave_s(timeouts: TimeoutsConfig, host: str) -> float:
    """Return how long a router that listens at ``host`` still takes requests after SIGTERM."""
    if timeouts.leave_s is not None:
        return timeouts.leave_s
    return 0.0 if is_loopback(host) else _LEAVE_S


async def _serve_picker(
    parts: Parts, runner: web.AppRunner, stack: AsyncExitStack
) -> Callable[[], Awaitable[None]]:
    """Listen; return what calls the picker not ready."""
    # An extra of its own, which only gateways need.
    from router.gateway.picker_server import CannotListenError, PickerServer  # noqa: PLC0415

    config = parts.judge.config
    settings = config.picker or PickerConfig()
    # Clients' TLS ends at the gateway.
    url = await _listen(runner, config, settings.host, settings.http_port, "picker.http_port")
    picker = PickerServer(parts.judge, settings)
    parts.members.listeners.append(picker.fleet_changed)
    try:
        port = await picker.start()
    except CannotListenError as error:
        raise PortTakenError(error.key, describe(error)) from None
    stack.push_async_callback(picker.stop, config.timeouts.drain_s)
    log.info(
        "picking one of %d replicas at %s (policy %s); its own endpoints are at %s",
        len(config.replicas),
        join_host_port(settings.host, port),
        config.policy,
        url,
    )
    return picker.leave


async def _serve_clients(
    runner: web.AppRunner, config: RouterConfig, tls: ssl.SSLContext | None
) -> None:
    url = await _listen(runner, config, config.host, config.port, "port", tls=tls)
    log.info(
        "serving %d replicas at %s (policy %s); clients use OPENAI_BASE_URL=%s/v1",
        len(config.replicas),
        url,
        config.policy,
        url,
    )
    if not config.access.keys and not is_loopback(config.host):
        log.warning("access.keys names no key: any client that reaches %s may use it", url)


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
        # A client that goes away cancels its handler, and with it the request
        # to the replica.
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
        taken = error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be listened on ({error.strerror})"
        raise PortTakenError(key, f"{host}:{port} {why}") from None
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
    """Return what SIGINT or SIGTERM is awaited by; a second one ends the process at once."""
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
