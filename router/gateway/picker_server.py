"""The endpoint picker's gRPC port: external processing, TLS, and health checks."""

import asyncio
import uuid
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.config.settings import PickerConfig
from router.fleet.replica import ReplicaState
from router.gateway import messages
from router.gateway.endpoints import Endpoints
from router.gateway.envoy_config import SENDS_ANSWERS
from router.gateway.exchange import Exchange
from router.gateway.messages import GatewayCall, Message
from router.policy import PREFILLER_HEADER
from router.priority import VLLM_PRIORITY_HEADER
from router.proxy.lifecycle import RequestLifecycle
from warmroute_common.addresses import join_host_port
from warmroute_common.api_errors import ApiError, TooLargeError
from warmroute_common.http_server import Bodies, defect
from warmroute_common.tasks import end_all

_LIVENESS: Final = ("", "liveness")
_READINESS: Final = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
_CHECK_S: Final = 0.5
_OVERHEAD_BYTES: Final = 1 << 20
"""Size limit of a message without its body."""


class CannotListenError(OSError):
    """The picker's port cannot be opened; ``key`` is its name in the configuration."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class PickerServer:
    """Serves gateways between `start` and `stop`."""

    def __init__(self, lifecycle: RequestLifecycle, settings: PickerConfig) -> None:
        self._lifecycle = lifecycle
        self._settings = settings
        self._endpoints = Endpoints(lifecycle.fleet)
        limit_bytes = lifecycle.config.max_body_bytes + _OVERHEAD_BYTES
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit_bytes),
                ("grpc.max_send_message_length", limit_bytes),
                # A second picker at this port would get half of the calls.
                ("grpc.so_reuseport", 0),
            ]
        )
        self._processor = ExternalProcessor(lifecycle, self._endpoints)
        self._health = health.aio.HealthServicer()
        self._is_leaving = False
        self._checks: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; return the port. Raises `CannotListenError`."""
        await self._endpoints.start()
        add_ExternalProcessorServicer_to_server(self._processor, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = await self._open_port()
        for name in _LIVENESS:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._update_readiness()
        await self._server.start()
        self._checks = asyncio.create_task(self._keep_readiness(), name="readiness")
        return port

    async def leave(self) -> None:
        """Report that it is not ready from now on; calls are still taken."""
        self._is_leaving = True
        await self._update_readiness()

    async def stop(self, drain_s: float) -> None:
        """Report that it is not ready; let running calls end within ``drain_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(drain_s)
        await self._processor.drain()
        if self._checks is not None:
            await end_all([self._checks])
        await self._endpoints.stop()

    def fleet_changed(self) -> None:
        """Look up the addresses of replicas that have joined."""
        self._endpoints.fleet_changed()

    async def _open_port(self) -> int:
        config = self._settings
        address = join_host_port(config.host, config.port)
        try:
            if config.certificate is None or config.key is None:
                return int(self._server.add_insecure_port(address))
            credentials = await asyncio.to_thread(
                _credentials, config.key, config.certificate, config.client_ca
            )
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:  # gRPC raises nothing more specific; its text says why
            raise CannotListenError("picker.port", str(error)) from None

    async def _keep_readiness(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._update_readiness()

    async def _update_readiness(self) -> None:
        """The picker is ready while a replica is up and it is not leaving."""
        replicas = self._lifecycle.fleet.replicas.values()
        is_ready = not self._is_leaving and any(each.state is ReplicaState.UP for each in replicas)
        status = health_pb2.HealthCheckResponse
        for name in _READINESS:
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)


def _credentials(key: str, certificate: str, client_ca: str | None) -> grpc.ServerCredentials:
    """Read the files; with ``client_ca`` callers must show a certificate."""
    return grpc.ssl_server_credentials(
        [(Path(key).read_bytes(), Path(certificate).read_bytes())],
        root_certificates=None if client_ca is None else Path(client_ca).read_bytes(),
        require_client_auth=client_ca is not None,
    )


class ExternalProcessor:
    """The gRPC service ``envoy.service.ext_proc.v3.ExternalProcessor``.

    A gateway makes one call for each request. Envoy with our configuration makes a second one
    (filter ``answers``) that has the first bytes of the answer.
    """

    def __init__(self, lifecycle: RequestLifecycle, endpoints: Endpoints) -> None:
        self._lifecycle = lifecycle
        self._endpoints = endpoints
        # Of this process: two pickers must not use one name.
        self._run = uuid.uuid4().hex[:8]
        self._numbers = count()
        config = lifecycle.config
        self._bodies = Bodies(within_s=config.timeouts.body_s, limit_bytes=config.max_bodies_bytes)
        self._exchanges: dict[str, Exchange] = {}
        """Requests under way, by the names that filter ``answers`` repeats."""
        self._closing: set[asyncio.Task[None]] = set()

    async def drain(self) -> None:
        """Wait until the last requests are closed; no call may be running."""
        await asyncio.gather(*self._closing)

    async def Process(self, _: object, context: Any) -> None:  # noqa: N802  (the protocol's name)
        """Answer one call."""
        with closing(GatewayCall(context)) as call:
            first = await call.read()
            if first is not None and first.HasField("response_body"):
                await self._read_answer(first, call)
            elif first is not None:
                await self._serve(first, call)
            if call.is_broken:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, "the message is not a ProcessingRequest"
                )

    async def _read_answer(self, message: Message | None, call: GatewayCall) -> None:
        """Read an answer's first bytes, as many as its exchange can use."""
        assert message is not None
        exchange = self._exchanges.get(messages.exchange_name(message) or "")
        while exchange is not None and message is not None:
            part = message.response_body
            if not await exchange.copied(part.body, is_last=part.end_of_stream):
                return
            message = await call.read()

    async def _serve(self, first: Message, call: GatewayCall) -> None:
        headers = messages.headers_of(first.request_headers)
        limit_bytes = self._lifecycle.config.max_body_bytes
        sends_copies = call.metadata(SENDS_ANSWERS) is not None
        exchange = Exchange(
            self._lifecycle,
            self._endpoints,
            headers.get(":method", ""),
            headers.get(":path", ""),
            headers,
            subset=messages.subset(first),
            sees_tokens=sends_copies or messages.sends_answer(first),
            gets_copies=sends_copies,
        )
        name = f"{self._run}-{next(self._numbers)}"
        self._exchanges[name] = exchange
        try:
            with exchange.noting_end():
                await _Conversation(self._bodies, exchange, name, first, call).run(limit_bytes)
        except ConnectionResetError:
            pass  # the client has left: no answer reaches it
        except ApiError as error:
            await call.write(messages.refusal(exchange.path, error, exchange.record.request_id))
        except Exception as error:  # noqa: BLE001  (the client gets an answer in its own shape)
            failure = defect(exchange.path, error)
            await call.write(messages.refusal(exchange.path, failure, exchange.record.request_id))
        finally:
            # In a task of its own: gRPC cancels this one when the gateway has ended its call.
            task = asyncio.create_task(self._close(name, exchange), name="end of a request")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, name: str, exchange: Exchange) -> None:
        try:
            await exchange.copy_read()
        finally:
            exchange.close()
            del self._exchanges[name]


class _Conversation:
    """One call for a whole request."""

    def __init__(
        self,
        bodies: Bodies,
        exchange: Exchange,
        name: str,
        first: Message,
        call: GatewayCall,
    ) -> None:
        self._bodies = bodies
        self._held_bytes = 0
        self._exchange = exchange
        self._name = name
        self._first = first
        self._call = call

    async def run(self, limit_bytes: int) -> None:
        """Answer all messages of the call; the request's body may have ``limit_bytes``."""
        try:
            if messages.has_streamed_body(self._first):
                await self._pick_by_parts(limit_bytes)
            else:
                await self._pick()
        finally:
            self._bodies.release(self._held_bytes)
        while (message := await self._call.read()) is not None:
            await self._call.write(await self._reply(message))

    async def _pick(self) -> None:
        """Answer the request's last message with its destination."""
        kind, body = "request_headers", b""
        if self._first.HasField("request_body"):
            kind, body = "request_body", self._first.request_body.body
        elif messages.has_whole_body(self._first):
            await self._call.write(messages.unchanged(kind))
            kind = "request_body"
            body = (await self._call.must_read(kind)).request_body.body
        self._hold(len(body))
        await self._send_destination(kind, body)

    def _hold(self, size_bytes: int) -> None:
        self._bodies.hold(size_bytes)
        self._held_bytes += size_bytes

    async def _pick_by_parts(self, left_bytes: int) -> None:
        """Take the body in parts; answer with the destination, then with the same parts."""
        parts: list[Message] = []
        is_last = False
        while not is_last:
            message = await self._call.must_read("request_body", "request_trailers")
            if is_last := message.HasField("request_trailers"):
                parts.append(messages.unchanged("request_trailers"))
                break
            self._hold(len(message.request_body.body))
            parts.append(messages.same_body("request_body", message.request_body))
            left_bytes -= len(message.request_body.body)
            if left_bytes < 0:
                raise TooLargeError(
                    "the body is too large (max_body_bytes in the router's settings)"
                )
            is_last = message.request_body.end_of_stream
        await self._send_destination("request_headers", messages.whole_body(parts))
        for each in parts:
            await self._call.write(each)

    async def _send_destination(self, kind: str, body: bytes) -> None:
        picked = await self._call.unless_ended(self._exchange.pick(body, self._bodies))
        headers = {} if picked.api_key is None else {"authorization": f"Bearer {picked.api_key}"}
        if picked.prefiller is not None:
            headers[PREFILLER_HEADER] = picked.prefiller
        # Also 0: the body, which the gateway does not change, may have another one.
        headers[VLLM_PRIORITY_HEADER] = str(picked.vllm_priority)
        message = messages.destination(kind, picked.endpoints, headers, self._name)
        await self._call.write(message)

    async def _reply(self, message: Message) -> Message:
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            headers = messages.headers_of(message.response_headers)
            served = messages.served_endpoint(message)
            is_last = message.response_headers.end_of_stream
            added = await self._exchange.answered(headers, served, is_last=is_last)
            return messages.answer_headers(added)
        if kind == "response_body":
            part = message.response_body
            self._exchange.came(part.body, is_last=part.end_of_stream)
            if messages.wants_answer_back(self._first):
                return messages.same_body(kind, part)
        if kind == "response_trailers":
            self._exchange.ended()
        return messages.unchanged(kind)
