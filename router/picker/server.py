"""The picker's port: gRPC, TLS if it is set up, and health checks."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

import grpc
from aiohttp import web
from envoy.service.accesslog.v3.als_pb2_grpc import add_AccessLogServiceServicer_to_server
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.config import PickerConfig, TlsConfig, host_port, server_context
from router.fleet import State
from router.picker.answers import AnswersLog
from router.picker.asks import Asks
from router.picker.endpoints import Endpoints
from router.picker.service import Processor
from router.proxy import RequestLifecycle
from warmroute_common.config_error import describe
from warmroute_common.http_server import Site
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.picker")

_LIVENESS: Final = ("", "liveness")
_READINESS: Final = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
_CHECK_S: Final = 0.5
_OVERHEAD_BYTES: Final = 1 << 20
"""Of a message beside the body in it."""


class CannotListenError(OSError):
    """A port cannot be listened on; ``key`` is its name in the configuration."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Picker:
    """Serves gateways between `start` and `stop`."""

    def __init__(self, judge: RequestLifecycle, settings: PickerConfig) -> None:
        self._judge = judge
        self._settings = settings
        self._endpoints = Endpoints(judge.fleet)
        limit_bytes = judge.config.max_body_bytes + _OVERHEAD_BYTES
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit_bytes),
                ("grpc.max_send_message_length", limit_bytes),
                # A second picker at this port would get half of the calls.
                ("grpc.so_reuseport", 0),
            ]
        )
        self._processor = Processor(judge, self._endpoints)
        self._asks = Asks(judge, self._endpoints)
        self._answers = AnswersLog(self._asks.note)
        self._runner: web.AppRunner | None = None
        self._health = health.aio.HealthServicer()
        self._leaves = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen; return gRPC's port. Raises `CannotListenError`."""
        await self._endpoints.start()
        add_ExternalProcessorServicer_to_server(self._processor, self._server)
        add_AccessLogServiceServicer_to_server(self._answers, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = await self._listen_to_gateways()
        for name in _LIVENESS:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._tell_readiness()
        await self._server.start()
        await self._listen_to_envoy()
        self._tasks = [
            asyncio.create_task(self._keep_telling(), name="readiness"),
            asyncio.create_task(self._asks.keep_closing(), name="silent requests"),
        ]
        return port

    async def leave(self) -> None:
        """Call it not ready from now on; calls are still taken."""
        self._leaves = True
        await self._tell_readiness()

    async def stop(self, drain_s: float) -> None:
        """Call it not ready; let calls under way end, for so long at most."""
        until_s = time.monotonic() + drain_s
        await self._health.enter_graceful_shutdown()
        if self._runner is not None:
            await self._runner.cleanup()
        # gRPC takes no new call from `stop` on: Envoy may yet have to open its log.
        await self._asks.drained(until_s - time.monotonic())
        await self._answers.end()
        await self._server.stop(max(0.0, until_s - time.monotonic()))
        await end_all(self._tasks)
        self._asks.close()
        await self._endpoints.stop()

    def fleet_changed(self) -> None:
        """Find out where replicas are that have joined."""
        self._endpoints.fleet_changed()

    async def _listen_to_gateways(self) -> int:
        config = self._settings
        address = host_port(config.host, config.port)
        try:
            if config.certificate is None or config.key is None:
                return int(self._server.add_insecure_port(address))
            files = (Path(config.key), Path(config.certificate))
            pair = await asyncio.to_thread(lambda: tuple(each.read_bytes() for each in files))
            return int(self._server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
        except RuntimeError as error:  # all that gRPC raises, and it says why
            raise CannotListenError("picker.port", str(error)) from None

    async def _listen_to_envoy(self) -> None:
        config, timeouts = self._settings, self._judge.config.timeouts
        if not config.envoy_port:
            return
        tls = None
        if config.certificate is not None and config.key is not None:
            tls = server_context(TlsConfig(cert_file=config.certificate, key_file=config.key))
        # A client that leaves, or its Envoy, ends the question that is held.
        self._runner = web.AppRunner(
            self._asks.app(), handler_cancellation=True, shutdown_timeout=timeouts.drain_s
        )
        await self._runner.setup()
        site = Site(self._runner, config.host, config.envoy_port, idle_s=timeouts.idle_s, tls=tls)
        try:
            await site.start()
        except OSError as error:
            raise CannotListenError("picker.envoy_port", describe(error)) from None

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._tell_readiness()

    async def _tell_readiness(self) -> None:
        """Ready is a picker that knows a replica which answers, and does not leave."""
        replicas = self._judge.fleet.replicas.values()
        is_ready = not self._leaves and any(each.state is State.UP for each in replicas)
        status = health_pb2.HealthCheckResponse
        for name in _READINESS:
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)
