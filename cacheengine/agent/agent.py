"""The agent's HTTP server, on a thread and an event loop of its own.

So it answers while the model computes, and while vLLM is idle. `AgentGuard` decides which requests
are accepted. `Agent` starts the server, the jobs that move chunks, the expiry of pins and the
registration with the controller, and stops them in reverse order.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from cacheengine.agent.agent_handlers import AgentHandlers
from cacheengine.agent.agent_requests import MAX_BODY_BYTES, AgentErrors, agent_bodies, wake
from cacheengine.agent.move_jobs import MoveJobs
from cacheengine.agent.peers import AgentHttpClient, ControllerRegistration
from cacheengine.agent.served_tokenizer import ServedTokenizer
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.kv_versions import KvVersions
from cacheengine.record import TransferMeter
from cacheengine.settings.engine_config import EngineConfig
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import join_host_port, without_password
from warmroute_common.api_errors import ForbiddenError, UnauthorizedError
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret, may_be_of_a_page
from warmroute_common.http_server import BODIES, Site, expecting_later

logger = logging.getLogger("vllm.warmroute")

_UNGUARDED_PATHS: Final = frozenset({"/health", "/metrics"})
"""Open to probes and Prometheus: their answers reveal nothing about prompts."""
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 15.0
_EXPIRY_INTERVAL_S: Final = 1.0
_IDLE_S: Final = 75.0
"""Longest pause between requests, or within a request's headers."""
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class AgentGuard:
    """Accepts callers that send the fleet secret; without a secret the agent listens on loopback.

    Web pages in a browser on this machine can also reach loopback, so requests that may come from
    one are refused.
    """

    def __init__(self, secret: FleetSecret | None) -> None:
        self._secret = secret

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass a request on, or raise `UnauthorizedError` or `ForbiddenError`."""
        if request.path not in _UNGUARDED_PATHS:
            self._check(request)
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        if self._secret is None:
            # Not request.host, which has a default if the header is missing.
            host, origin = request.headers.get("Host"), request.headers.get("Origin")
            if may_be_of_a_page(host, origin):
                raise ForbiddenError(
                    "the Host or Origin header shows that this may come from a web page: use "
                    f"localhost or an address in the URL, or {HOW_TO_SET}"
                )
            return
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._secret.is_known_by(shown.strip()):
            raise UnauthorizedError(
                "this agent requires the fleet secret, as 'Authorization: Bearer SECRET'; "
                f"for routers and replicas {HOW_TO_SET}"
            )


class Agent:
    """Serves one engine over HTTP from `start` to `stop`.

    Registers with the controller if ``config`` names one. ``meter`` counts the chunks exchanged
    with other replicas; the `TransferServer` can use the same one. `start` raises OSError, which
    names the address, if it cannot listen there. `stop` is idempotent and may be called without a
    start.
    """

    def __init__(
        self,
        engine: CacheEngine,
        identity: wire.ReplicaIdentity,
        config: EngineConfig,
        meter: TransferMeter | None = None,
        versions: KvVersions | None = None,
        *,
        tokenizer: ServedTokenizer | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer or ServedTokenizer(None)
        self._versions = versions or KvVersions()
        self._identity = identity
        self._config = config
        self._meter = meter or TransferMeter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self.address: tuple[str, int] | None = None
        """The host and port that it listens on, once started."""

    def start(self) -> None:
        """Listen; returns when requests are answered."""
        started: Future[None] = Future()

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except Exception as error:  # noqa: BLE001  raised again by start()
                if not started.done():
                    started.set_exception(error)

        self._thread = threading.Thread(target=run, name="kv-agent", daemon=True)
        self._thread.start()
        try:
            started.result(_START_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"the agent did not start within {_START_TIMEOUT_S} s") from None
        except OSError as error:
            where = join_host_port(self._config.agent_host, self._config.lmcache_worker_port)
            raise OSError(f"lmcache_worker_port: cannot listen on {where}: {error}") from error

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Deregister, end the running jobs, stop listening; wait for the thread that does it."""
        if self._loop is not None and self._stopping is not None:
            wake(self._loop, self._stopping)
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._loop = self._thread = None

    async def _serve(self, started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        async with AsyncExitStack() as undo:
            session = await undo.enter_async_context(aiohttp.ClientSession())
            caller, secret = (
                AgentHttpClient(session, self._config.fleet_secret),
                self._config.fleet_secret,
            )
            move_jobs = MoveJobs(self._engine, self._identity, caller, self._meter)
            errors = AgentErrors()
            app = web.Application(
                client_max_size=MAX_BODY_BYTES,
                middlewares=[errors.middleware, AgentGuard(secret).guard],
            )
            app[BODIES] = agent_bodies()
            handlers = AgentHandlers(
                *(self._engine, self._identity, move_jobs, self._meter, self._versions),
                self._tokenizer,
            )
            app.add_routes(expecting_later(handlers.routes()))
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
            await runner.setup()
            undo.push_async_callback(runner.cleanup)
            undo.push_async_callback(move_jobs.stop)
            config = self._config
            await Site(
                runner, config.agent_host, config.lmcache_worker_port, idle_s=_IDLE_S, errors=errors
            ).start()
            self.address = runner.addresses[0][:2]
            logger.info("Warmroute agent of %s on %s", self._identity.instance_id, self.address)
            _run_within(undo, self._expire_pins())
            if config.controller_base_url is not None:
                registrar = self._registrar(caller, config.controller_base_url, self.address)
                undo.push_async_callback(registrar.leave)
                _run_within(undo, registrar.run())
            started.set_result(None)
            await self._stopping.wait()

    def _registrar(
        self, caller: AgentHttpClient, controller_url: str, address: tuple[str, int]
    ) -> ControllerRegistration:
        # Nobody can connect to a wildcard address. The controller then uses the address that the
        # registration comes from.
        host = "" if self._config.agent_host in _WILDCARDS else self._config.agent_host
        if host in _LOOPBACK and urlsplit(controller_url).hostname not in _LOOPBACK:
            logger.warning(
                "the controller at %s cannot reach this agent at %s: set agent_host to an "
                "address of this machine, or to 0.0.0.0",
                without_password(controller_url),
                join_host_port(*address),
            )
        registration = wire.Registration(
            instance_id=self._identity.instance_id,
            incarnation=self._engine.incarnation,
            agent_url=f"http://{join_host_port(host, address[1])}",
            transfer_port=self._identity.transfer_port,
            heartbeat_s=self._config.lmcache_worker_heartbeat_time,
            openai_url=self._config.openai_url,
        )
        return ControllerRegistration(caller, controller_url, registration)

    async def _expire_pins(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self._engine.expire_pins()


def _run_within(undo: AsyncExitStack, work: Coroutine[None, None, None]) -> None:
    """Run ``work`` as a task; when ``undo`` unwinds, cancel the task and wait for its end."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    undo.push_async_callback(end)
