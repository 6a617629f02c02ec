"""Following one vLLM's KV events over ZMQ, with nothing missed or nothing believed.

At first contact, after a gap, and when it has been quiet for a while, what may
be missing is asked from the publisher's replay endpoint, again and again where
the answer is too long to be had at once. What cannot be had ends in
`KvSink.forget`: better to know nothing of a GPU than something wrong.
A lost connection ends `follow`; the caller starts again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.feeds.kv_receiver import KvReceiver
from router.index.kv_events import KvBatch, KvEventFormatError, KvEventReader
from warmroute_common.tasks import end_all

_REPLAY_TIMEOUT_S: Final = 5.0
_QUIET_S: Final = 10.0
_HIGH_WATER: Final = 100_000
"""Messages kept while others are being applied, as many as vLLM keeps to be sent."""
_REPLAY_HIGH_WATER: Final = 100
"""Replayed messages kept while others are being applied. A replay is what a publisher has told in
many minutes, and comes at once: megabytes, of which ZMQ's thread would not give back all."""
_REPLAY_CUT: Final = 1000
"""So many messages of a replay a publisher keeps to be sent, by ZMQ's default; beyond them it drops
what comes before some have gone. A shorter replay is whole."""
_CUT_AFTER_S: Final = 0.2
"""After such a pause a longer one is asked for again: its end may have been dropped too."""
_NUMBER_BYTES: Final = 8
_SNAPSHOT_NUMBER_BYTES: Final = 24
"""A number and a publisher's id: the format proposed for vLLM's snapshots of KV events."""
_END_OF_REPLAY: Final = b"\xff" * _NUMBER_BYTES
_MOST: Final = (1 << 63) - 1
_HEARTBEAT_MS: Final = 5_000
_DEAD_AFTER_MS: Final = 15_000
_MONITORS: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Where a vLLM publishes; ``replay`` is None where it repeats nothing."""

    events: str
    replay: str | None = None
    topic: str = ""


class KvSink(Protocol):
    """The receiver of one replica's events."""

    def following(self) -> None:
        """Everything that can be known is known; what comes now is new."""

    def apply(self, batch: KvBatch) -> None:
        """Take a message, in order, each once."""

    def forget(self) -> None:
        """Drop all that earlier messages told."""


class KvSubscriber:
    """Follows one publisher; made for one connection."""

    def __init__(
        self,
        receiver: KvReceiver,
        endpoints: KvEndpoints,
        reader: KvEventReader,
        sink: KvSink,
        *,
        replay_timeout_s: float = _REPLAY_TIMEOUT_S,
        quiet_s: float = _QUIET_S,
    ) -> None:
        self._receiver = receiver
        self._context = receiver.context
        self._endpoints = endpoints
        self._reader = reader
        self._sink = sink
        self._replay_timeout_s = replay_timeout_s
        self._quiet_s = quiet_s
        self._expected = 0
        self._last_ts = -inf
        self._ahead: KvBatch | None = None
        """A message that came although others are missing before it."""

    async def run(self) -> None:
        """Connect, however long that takes, and follow until the connection is lost.

        Raises `KvEventFormatError` for messages that are not vLLM's. On every way out
        nothing is known any more.
        """
        # Not asyncio's: the loop would be woken for each message.
        with contextlib.closing(zmq.Context(self._context).socket(zmq.SUB)) as socket:
            try:
                with monitoring(socket, self._context) as monitor:
                    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
                    socket.subscribe(self._endpoints.topic)
                    _connect(socket, self._endpoints.events)
                    await _monitored(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
                    lost = _monitored(monitor, zmq.EVENT_DISCONNECTED)
                    await until_first(self._follow(socket), lost)
            finally:
                self._sink.forget()

    async def _follow(self, socket: zmq.SyncSocket) -> None:
        await self._catch_up()
        self._sink.following()
        while True:
            await self._receiver.receive(socket, self._take, self._quiet_s)
            # A message is missing: before one that has come, or, as it is quiet, perhaps the last.
            # What comes meanwhile waits in the socket.
            await self._catch_up()
            if (batch := self._ahead) is not None:
                self._ahead = None
                self._apply(batch)

    def _take(self, frames: Sequence[bytes]) -> bool:
        """Apply a message; return False if messages are missing before it, which come first.

        A number that was seen before is a duplicate (of a replay) if its time is
        not later than the last one's, else the publisher has restarted.
        """
        if len(frames) != 3:
            return True
        batch = self._reader.read(_number(frames[1]), frames[2])
        if batch.seq < self._expected:
            if batch.ts <= self._last_ts:
                return True
            self._expected = 0
            self._forget()
        if batch.seq > self._expected:
            self._ahead = batch
            return False
        self._apply(batch)
        return True

    async def _catch_up(self) -> None:
        """Apply what is missing, as far as the publisher still has it."""
        if self._endpoints.replay is None:
            return
        while await self._take_replay(self._endpoints.replay):
            pass

    async def _take_replay(self, endpoint: str) -> bool:
        """Apply one replay of what is missing; return whether the publisher may have more of it.

        It drops what does not fit in its queue: there is a gap then, or an early end, and the
        messages are had by another replay. Messages before a replay's first one are gone for good.
        """
        start = self._expected
        replay = self._replay(endpoint, start)
        async with contextlib.aclosing(replay):
            async for batch in replay:
                if batch.seq > self._expected > start:
                    return True
                self._apply(batch)
                # Frames that are there already are received without a pause:
                # let others run between the messages of a long replay.
                await asyncio.sleep(0)
        return self._expected - start >= _REPLAY_CUT

    async def _replay(self, endpoint: str, start: int) -> AsyncGenerator[KvBatch, None]:
        """Yield the messages from number ``start`` on; end early if they stop coming.

        The socket is a new one each time: the rest of an answer that was given
        up would otherwise be read as the next one.
        """
        with contextlib.closing(self._context.socket(zmq.DEALER)) as socket:
            socket.setsockopt(zmq.RCVHWM, _REPLAY_HIGH_WATER)
            _connect(socket, endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            taken, wait_s = 0, self._replay_timeout_s
            while await socket.poll(wait_s * 1000):
                # [b"", topic, seq, payload]; before vLLM 0.32 without the topic.
                *frames, payload = await socket.recv_multipart()
                if not frames:
                    raise KvEventFormatError("a replayed message has no number")
                if frames[-1] == _END_OF_REPLAY:
                    return
                yield self._reader.read(_number(frames[-1]), payload)
                taken += 1
                if taken == _REPLAY_CUT:
                    wait_s = min(wait_s, _CUT_AFTER_S)

    def _apply(self, batch: KvBatch) -> None:
        """Pass on a message that is new.

        Messages that are missing before it are given up here, and with them what they
        may have changed.
        """
        if batch.seq < self._expected:
            return
        if batch.seq > self._expected > 0:
            self._forget()
        self._expected, self._last_ts = batch.seq + 1, batch.ts
        self._sink.apply(batch)

    def _forget(self) -> None:
        self._sink.forget()
        self._sink.following()


def _connect(socket: zmq.SyncSocket | zmq.asyncio.Socket, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_AFTER_MS)
    socket.connect(endpoint)


def _number(frame: bytes) -> int:
    """Return a message's number; raise `KvEventFormatError` for what cannot be counted on from."""
    number = int.from_bytes(frame, "big")
    if len(frame) == _SNAPSHOT_NUMBER_BYTES:
        raise KvEventFormatError("they come with snapshots; turn these off in --kv-events-config")
    if len(frame) != _NUMBER_BYTES or number > _MOST:
        raise KvEventFormatError(f"0x{frame.hex()[:40]} is no message's number")
    return number


@contextlib.contextmanager
def monitoring(
    socket: zmq.SyncSocket, context: zmq.asyncio.Context
) -> Iterator[zmq.asyncio.Socket]:
    """Give a socket that tells when ``socket`` is connected, and when no longer."""
    # A name of its own each time: ZMQ's thread frees the name of a closed socket later, and the
    # next socket may have its id.
    address = f"inproc://monitor-{next(_MONITORS)}"
    socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    monitor = context.socket(zmq.PAIR)
    try:
        monitor.connect(address)
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


async def _monitored(monitor: zmq.asyncio.Socket, wanted: int) -> None:
    """Return when a socket's monitor reports an event."""
    while True:
        message = await cast("Awaitable[dict[str, int]]", recv_monitor_message(monitor))
        if message["event"] == wanted:
            return


async def until_first(work: Awaitable[object], end: Awaitable[object]) -> None:
    """Run both until one is done, then end the other; raise what it raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(end)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        await end_all(tasks)
