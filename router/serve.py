"""Running the router until it is told to stop."""

import asyncio
import errno
import logging
import signal
import sys

import uvloop
from aiohttp import web

from router.app import create_app
from router.config import RouterConfig

log = logging.getLogger("warmroute")


class PortTaken(Exception):  # noqa: N818  (what happened, in words for a person)
    """The address cannot be listened on."""


def run(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM, then drain; raise `PortTaken`."""
    logging.basicConfig(
        level=config.logging_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)s %(message)s",
    )
    uvloop.run(_serve(config))


async def _serve(config: RouterConfig) -> None:
    runner = web.AppRunner(
        create_app(config),
        # A client that goes away cancels its handler, and with it the request
        # to the replica.
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.timeouts.drain_s,
    )
    stop = _stop_event()
    await runner.setup()
    try:
        await _listen(runner, config)
        await stop.wait()
        log.info("stopping: running requests may take %g s more", config.timeouts.drain_s)
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: RouterConfig) -> None:
    site = web.TCPSite(runner, config.host, config.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be listened on ({error.strerror})"
        raise PortTaken(f"{config.host}:{config.port} {why}") from None
    host, port = runner.addresses[0][:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info(
        "serving %d replicas at %s (policy %s); clients use OPENAI_BASE_URL=%s/v1",
        len(config.replicas),
        url,
        config.policy,
        url,
    )


def _stop_event() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop
