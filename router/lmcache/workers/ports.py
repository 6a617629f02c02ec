"""The three ports where LMCache's workers find their controller: ZeroMQ, a task for each.

What comes is taken in the order in which it came; what is malformed is counted, and answered
with an error where an answer is waited for.
"""

import asyncio
import logging
import socket as sockets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from router.config import LmcacheWorkersConfig, join_host_port
from warmroute_common.config_reader import ConfigError, describe
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

_HIGH_WATER: Final = 10_000
"""Messages kept while others are being taken; of more the workers keep them."""
_LONGEST_BYTES: Final = 16 << 20
"""Of one message: a full sync's part has 2,000 keys, of 9 bytes each."""
_ANYWHERE: Final = frozenset({"0.0.0.0", "::", "*"})

Handle = Callable[[bytes], msgspec.Struct | None]
"""Takes a message and returns the answer, if one is waited for; neither raises nor waits."""


class Ports:
    """The ports, between `open` and `close`."""

    def __init__(self, config: LmcacheWorkersConfig, context: zmq.asyncio.Context) -> None:
        self._config = config
        self._context = context
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.numbers: dict[str, int] = {}
        """The ports' numbers by their names in the configuration."""

    def open(self, take: Handle, answer: Handle, beat: Handle) -> None:
        """Listen; raise `ConfigError` where a port cannot be listened on.

        ``take`` gets each pushed message, ``answer`` and ``beat`` the requests at the reply and
        the heartbeat port.
        """
        pull = self._bind("pull_port", zmq.PULL)
        reply = self._bind("reply_port", zmq.ROUTER)
        heartbeat = self._bind("heartbeat_port", zmq.ROUTER)
        for name, run in (
            ("pull", self._pull(pull, take)),
            ("reply", self._reply(reply, answer)),
            ("heartbeat", self._reply(heartbeat, beat)),
        ):
            self._tasks.append(asyncio.create_task(run, name=f"lmcache-workers-{name}"))

    async def close(self) -> None:
        """End that."""
        await end_all(self._tasks)
        for each in self._sockets:
            each.close(linger=0)
        self._tasks, self._sockets = [], []

    def heartbeat_url(self, worker_ip: str) -> str:
        """Return ``host:port`` of the heartbeat port, as a worker reaches it."""
        host = self._config.unauthenticated_host
        if host in _ANYWHERE:
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
            found = f"{join_host_port(host, port)} cannot be listened on ({zmq.strerror(error.errno or 0)})"
            raise ConfigError("", f"lmcache_workers.{key}", found, "choose another") from None
        self.numbers[key] = int(str(socket.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])
        return socket

    @staticmethod
    async def _pull(socket: zmq.asyncio.Socket, take: Handle) -> None:
        while True:
            for frame in await socket.recv_multipart():
                take(frame)
            # Of what lies ready recv gives one after the other without a pause.
            await asyncio.sleep(0)

    @staticmethod
    async def _reply(socket: zmq.asyncio.Socket, answer: Handle) -> None:
        while True:
            sender, *frames = await socket.recv_multipart()
            told = answer(frames[-1] if frames else b"")
            # One that has gone is not waited for: a ROUTER drops what it cannot send.
            with suppress(zmq.ZMQError):
                await socket.send_multipart([sender, b"", msgspec.msgpack.encode(told)])
            await asyncio.sleep(0)


def _own_address(towards: str) -> str:
    """Return this machine's address on the way to another one."""
    family = sockets.AF_INET6 if ":" in towards else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            log.warning("no way to the LMCache worker at %s: %s", towards, describe(error))
            return "127.0.0.1"
        address: Any = probe.getsockname()[0]
        return str(address)
