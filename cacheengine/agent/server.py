"""The agent's server: a thread and an event loop of its own.

So it answers while the model computes, and while the model is idle.
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

from cacheengine.agent.agent_requests import MAX_BODY_BYTES, AgentErrors, agent_bodies, wake
from cacheengine.agent.guard import Guard
from cacheengine.agent.handlers import Handlers
from cacheengine.agent.mover import Mover
from cacheengine.agent.peers import Caller, Registrar
from cacheengine.engine import CacheEngine
from cacheengine.identity import KvVersions
from cacheengine.record import TransferMeter
from cacheengine.settings import EngineConfig
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import join_host_port, without_password
from warmroute_common.http_server import BODIES, Site

logger = logging.getLogger("vllm.warmroute")

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 15.0
_EXPIRY_INTERVAL_S: Final = 1.0
_IDLE_S: Final = 75.0
"""Between requests, or within a request's headers."""
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Agent:
    """Serves one engine over HTTP from `start` to `stop`.

    Registers with the controller meanwhile, if ``config`` names one. ``meter``
    counts the chunks exchanged with other replicas, beside the transfer
    server's if both are given the same one.

    `start` raises OSError, naming the address, when the port is taken. `stop`
    is idempotent and may be called without a start.
    """

    def __init__(
        self,
        engine: CacheEngine,
        identity: wire.ReplicaIdentity,
        config: EngineConfig,
        meter: TransferMeter | None = None,
        versions: KvVersions | None = None,
    ) -> None:
        self._engine = engine
        self._versions = versions or KvVersions()
        self._identity = identity
        self._config = config
        self._meter = meter or TransferMeter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self.address: tuple[str, int] | None = None
        """Host and port listened on, once started."""

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
            raise TimeoutError(f"no start of the agent within {_START_TIMEOUT_S} s") from None
        except OSError as error:
            where = join_host_port(self._config.agent_host, self._config.lmcache_worker_port)
            raise OSError(f"lmcache_worker_port: cannot listen on {where}: {error}") from error

    def stop(self) -> None:
        """Deregister, end the moves, close the listening socket and end the thread."""
        if self._loop is not None and self._stopping is not None:
            wake(self._loop, self._stopping)
        if self._thread is not None:
            self._thread.join(timeout=_STOP_TIMEOUT_S)
        self._loop = self._thread = None

    async def _serve(self, started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        async with AsyncExitStack() as undo:
            session = await undo.enter_async_context(aiohttp.ClientSession())
            caller, secret = Caller(session, self._config.fleet_secret), self._config.fleet_secret
            mover = Mover(self._engine, self._identity, caller, self._meter)
            errors = AgentErrors()
            app = web.Application(
                client_max_size=MAX_BODY_BYTES,
                middlewares=[errors.middleware, Guard(secret).guard],
            )
            app[BODIES] = agent_bodies()
            handlers = Handlers(self._engine, self._identity, mover, self._meter, self._versions)
            app.add_routes(handlers.routes())
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
            await runner.setup()
            undo.push_async_callback(runner.cleanup)
            undo.push_async_callback(mover.stop)
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
        self, caller: Caller, controller_url: str, address: tuple[str, int]
    ) -> Registrar:
        # A wildcard is no address: the controller takes the one that the
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
        return Registrar(caller, controller_url, registration)

    async def _expire_pins(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self._engine.expire_pins()


def _run_within(undo: AsyncExitStack, work: Coroutine[None, None, None]) -> None:
    """Run ``work`` as a task that is cancelled, and waited for, when ``undo`` unwinds."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    undo.push_async_callback(end)
