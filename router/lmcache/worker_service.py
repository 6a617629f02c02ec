"""The router as the controller of LMCache inside vLLM (``LMCacheConnectorV1``), over ZeroMQ.

Workers push their events to one port, and send requests and heartbeats to two others. Messages are
taken in the order in which they arrive. A malformed message is counted, and answered with an error
if its sender waits for an answer.
"""

import asyncio
import logging
import socket as sockets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from router.config.settings import LmcacheWorkersConfig
from router.fleet.fleet import Fleet
from router.lmcache.worker_control import WorkerClient, WorkerControl, is_listening
from router.lmcache.worker_events import WorkerEvents
from router.lmcache.worker_protocol import (
    BatchedKVOperationMsg,
    BatchedP2PLookupMsg,
    BatchedP2PLookupRetMsg,
    DeRegisterMsg,
    ErrorMsg,
    FullSyncBatchMsg,
    FullSyncEndMsg,
    FullSyncStartMsg,
    FullSyncStatusMsg,
    HeartbeatMsg,
    HeartbeatRetMsg,
    Pushed,
    RegisterMsg,
    RegisterRetMsg,
    Requested,
    full_sync,
)
from router.lmcache.worker_registry import WorkerRegistry
from warmroute_common.addresses import join_host_port
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import ApiError
from warmroute_common.config_reader import ConfigError, describe
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 1.0
_HIGH_WATER: Final = 10_000
"""Messages that wait here; the workers keep further ones."""
_LONGEST_BYTES: Final = 16 << 20
"""Per message: a batch of a full sync has 2,000 keys of 9 bytes each."""
_ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::", "*"})

_PUSHED: Final[msgspec.msgpack.Decoder[Pushed]] = msgspec.msgpack.Decoder(Pushed)
_REQUESTED: Final[msgspec.msgpack.Decoder[Requested]] = msgspec.msgpack.Decoder(Requested)
_HEARTBEAT: Final = msgspec.msgpack.Decoder(HeartbeatMsg)

_Handle = Callable[[bytes], msgspec.Struct | None]
"""Takes a message and returns its answer, if it has one; does not raise, does not wait."""


class WorkerPorts:
    """The three ports, between `open` and `close`."""

    def __init__(self, config: LmcacheWorkersConfig, context: zmq.asyncio.Context) -> None:
        self._config = config
        self._context = context
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.numbers: dict[str, int] = {}
        """The ports' numbers by their keys in the configuration."""

    def open(self, push: _Handle, reply: _Handle, heartbeat: _Handle) -> None:
        """Listen, and hand messages over; raise `ConfigError` if a port cannot be opened."""
        sockets_of = {
            "pull_port": (zmq.PULL, self._pull, push),
            "reply_port": (zmq.ROUTER, self._reply, reply),
            "heartbeat_port": (zmq.ROUTER, self._reply, heartbeat),
        }
        bound = {key: self._bind(key, kind) for key, (kind, _, _) in sockets_of.items()}
        for key, (_, run, handle) in sockets_of.items():
            name = f"lmcache-workers-{key}"
            self._tasks.append(asyncio.create_task(run(bound[key], handle), name=name))

    async def close(self) -> None:
        await end_all(self._tasks)
        for each in self._sockets:
            each.close(linger=0)
        self._tasks, self._sockets = [], []

    def heartbeat_url(self, worker_ip: str) -> str:
        """Return ``host:port`` of the heartbeat port, as a worker reaches it."""
        host = self._config.unauthenticated_host
        if host in _ANY_ADDRESS:
            host = _own_address(worker_ip)
        return join_host_port(host, self.numbers["heartbeat_port"])

    def _bind(self, key: str, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        host, port = self._config.unauthenticated_host, getattr(self._config, key)
        socket.rcvhwm, socket.maxmsgsize = _HIGH_WATER, _LONGEST_BYTES
        socket.ipv6 = ":" in host
        try:
            socket.bind(f"tcp://{join_host_port(host, port)}")
        except zmq.ZMQError as error:
            problem = (
                f"cannot listen at {join_host_port(host, port)} ({zmq.strerror(error.errno or 0)})"
            )
            fix = "choose another port, or another unauthenticated_host"
            raise ConfigError("", f"lmcache_workers.{key}", problem, fix) from None
        self.numbers[key] = int(str(socket.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])
        return socket

    @staticmethod
    async def _pull(socket: zmq.asyncio.Socket, handle: _Handle) -> None:
        while True:
            for frame in await socket.recv_multipart():
                handle(frame)
            # recv returns messages that wait already without ever giving way to other tasks.
            await asyncio.sleep(0)

    @staticmethod
    async def _reply(socket: zmq.asyncio.Socket, handle: _Handle) -> None:
        while True:
            sender, *frames = await socket.recv_multipart()
            answer = handle(frames[-1] if frames else b"")
            # A ROUTER socket drops what it cannot send: a sender that has gone holds up nobody.
            with suppress(zmq.ZMQError):
                await socket.send_multipart([sender, b"", msgspec.msgpack.encode(answer)])
            await asyncio.sleep(0)


def _own_address(towards: str) -> str:
    """Return the address of this machine's interface that reaches another machine."""
    family = sockets.AF_INET6 if ":" in towards else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            log.warning(
                "there is no route to the LMCache worker at %s: %s", towards, describe(error)
            )
            return "127.0.0.1"
        address: Any = probe.getsockname()[0]
        return str(address)


class LmcacheWorkers:
    """Runs between `listen` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        config: LmcacheWorkersConfig,
        counts: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._counts = counts
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self.registry = WorkerRegistry(fleet, config, counts)
        self._events = WorkerEvents(fleet, self.registry)
        self.ports = WorkerPorts(config, self._context)
        self.control = WorkerControl(fleet, self.registry, WorkerClient(self._context))
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Open the ports; raise `ConfigError`, with none left open, if one cannot be opened."""
        handlers = (self._pushed, self._requested, self._heartbeat)
        try:
            self.ports.open(*(partial(self._counted, each) for each in handlers))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._task = asyncio.create_task(self._watch(), name="lmcache-workers")
        numbers = ", ".join(f"{name} {port}" for name, port in self.ports.numbers.items())
        log.info(
            "LMCache inside vLLM registers at %s: %s", self._config.unauthenticated_host, numbers
        )

    async def stop(self) -> None:
        """Close the ports; calls to workers fail."""
        await end_all([] if self._task is None else [self._task])
        await self.ports.close()
        self._context.destroy(linger=0)

    def listing(self) -> list[dict[str, Any]]:
        """Return the registered instances for ``GET /instances``."""
        return self.control.listing(self._clock())

    # --- messages

    def _pushed(self, frame: bytes) -> None:
        now_s, events = self._clock(), self._events
        match _PUSHED.decode(frame):
            case BatchedKVOperationMsg() as message:
                events.operations(message, now_s)
            case FullSyncBatchMsg() as message:
                events.sync_batch(message, now_s)
            case FullSyncEndMsg() as message:
                events.sync_ended(message, now_s)
            case DeRegisterMsg() as message:
                self.registry.deregister(message)

    def _requested(self, frame: bytes) -> msgspec.Struct:
        now_s, events = self._clock(), self._events
        match _REQUESTED.decode(frame):
            case RegisterMsg() as message:
                self.registry.register(message, now_s)
                url = self.ports.heartbeat_url(message.ip)
                return RegisterRetMsg(extra_config={"heartbeat_url": url})
            case BatchedP2PLookupMsg() as message:
                return BatchedP2PLookupRetMsg(layout_info=[events.peer_with(message, now_s)])
            case FullSyncStartMsg() as message:
                return events.sync_started(message, now_s)
            case FullSyncStatusMsg() as message:
                return events.sync_status(message, now_s)

    def _heartbeat(self, frame: bytes) -> msgspec.Struct:
        reason = self.registry.heartbeat(_HEARTBEAT.decode(frame), self._clock())
        return HeartbeatRetMsg(commands=[] if reason is None else [full_sync(reason)])

    def _counted(
        self, handle: Callable[[bytes], msgspec.Struct | None], frame: bytes
    ) -> msgspec.Struct | None:
        """Handle a message; turn its errors into counts and an answer."""
        try:
            return handle(frame)
        except ApiError as error:
            self._counts["worker_refused"] += 1
            log.error("an LMCache worker was refused: %s", error.message)
            return ErrorMsg(error=error.message)
        except UNREADABLE as error:
            self._counts["worker_malformed"] += 1
            log.debug("malformed message of an LMCache worker: %s", error)
            return ErrorMsg(error=str(error))
        except Exception:  # otherwise the port's task would end without a trace
            log.exception("handling a message of an LMCache worker failed")
            return ErrorMsg(error="the router failed; see its log")

    # --- whether workers live

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_EVERY_S, self._config.timeout_s / 4))
            try:
                await self._probe()
                self.registry.expire(self._clock())
            except Exception:  # otherwise the task would end without a trace
                log.exception("watching LMCache's workers failed")

    async def _probe(self) -> None:
        """Check that workers without heartbeats still listen: by default LMCache sends none."""
        began_s = self._clock()
        quiet = [
            each
            for each in self.registry.all()
            if not each.heartbeats and began_s - each.seen_s > self._config.timeout_s / 2
        ]
        listening = await asyncio.gather(*map(is_listening, quiet))
        for each, listens in zip(quiet, listening, strict=True):
            if listens:
                each.seen_s = max(each.seen_s, began_s)
