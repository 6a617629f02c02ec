"""Receiving the KV events of all replicas on the event loop, in bounded slices.

A socket of asyncio's ZMQ wakes the loop for every message, which costs more than everything else
that is done with one. Here one descriptor, an epoll, stands for the sockets of all streams. When
something has arrived, one task empties them in turns, a bounded part before others may run. Then
the loop listens again after a gap, in which messages gather.

All of this runs in the loop's thread. To receive what has arrived, to decode it and to apply it
needs Python's lock: in a thread it would cost the same, and requests would wait for its switches.
"""

import asyncio
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import zmq
import zmq.asyncio

from warmroute_common.tasks import end_all

_SLICE_BYTES: Final = 8_192
"""Messages of all streams that are taken before others may run: up to half a millisecond. A
request waits for several such turns."""
_STREAM_BYTES: Final = 2_048
"""Messages of one stream that are taken before the next stream has its turn."""
_MESSAGE_BYTES: Final = 256
"""Any message costs at least as much as this many bytes of a long one."""
_GAP_S: Final = 0.01
"""From when all sockets are empty until the loop listens to them again."""

TakeMessage = Callable[[Sequence[bytes]], bool]
"""Takes a message's frames; returns whether the next message may follow at once."""


@dataclass(eq=False, slots=True)
class _Stream:
    """A socket whose messages are wanted."""

    socket: zmq.SyncSocket
    take: TakeMessage
    ended: asyncio.Future[None]
    heard_s: float
    is_ready: bool = False
    """Whether it is in the queue of streams that may have messages."""


class KvReceiver:
    """Receives for all streams, between its making and `aclose`; has their ZMQ context."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        # It must be told before the first socket, and allows 1023 altogether unless it is.
        self.context.set(zmq.MAX_SOCKETS, self.context.get(zmq.SOCKET_LIMIT))
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._ready: deque[_Stream] = deque()
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._behind_since_s: float | None = None

    async def aclose(self) -> None:
        """Stop receiving, and close the context's sockets; no stream may be left."""
        if self._running is not None:
            await end_all([self._running])
        self._epoll.close()
        self.context.destroy(linger=0)

    @property
    def behind_s(self) -> float:
        """For how long there was no moment in which all messages were taken; 0 if now is one."""
        since_s = self._behind_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def receive(self, socket: zmq.SyncSocket, take: TakeMessage, quiet_s: float) -> None:
        """Call ``take`` with each message of a socket, in order.

        Returns when ``take`` has returned False, or when no message came for ``quiet_s``. Raises
        what ``take`` and ZMQ raise. Messages that come later stay in the socket: nothing is taken
        after ``take`` has returned False or raised, nor after this has ended.
        """
        loop = asyncio.get_running_loop()
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        stream = _Stream(socket, take, loop.create_future(), time.monotonic())
        descriptor = cast("int", socket.getsockopt(zmq.FD))
        self._streams[descriptor] = stream
        self._epoll.register(descriptor, select.EPOLLIN)
        # The descriptor shows arrivals, not the messages that have arrived before.
        self._queue(stream)
        self._woken.set()
        try:
            while (left_s := stream.heard_s + quiet_s - time.monotonic()) > 0:
                ends = [stream.ended, self._running]
                done, _ = await asyncio.wait(
                    ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    return each.result()
        finally:
            # A slice may still come to it. An error that meets a cancellation is dropped.
            if not stream.ended.cancel():
                stream.ended.exception()
            del self._streams[descriptor]
            self._epoll.unregister(descriptor)

    async def _run(self) -> None:
        while True:
            self._queue_arrived()
            if not self._ready:
                await self._arrival()
                continue
            self._behind_since_s = time.monotonic()
            while self._ready:
                self._take_slice()
                await asyncio.sleep(0)
                # Streams that are never empty must not keep others waiting.
                self._queue_arrived()
            self._behind_since_s = None
            await asyncio.sleep(_GAP_S)

    async def _arrival(self) -> None:
        """Return when a message may have arrived, or a stream has come."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._epoll.fileno(), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            loop.remove_reader(self._epoll.fileno())
        self._woken.clear()

    def _queue_arrived(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            self._queue(self._streams[descriptor])

    def _queue(self, stream: _Stream) -> None:
        if not stream.is_ready:
            stream.is_ready = True
            self._ready.append(stream)

    def _take_slice(self) -> None:
        left_bytes = _SLICE_BYTES
        while self._ready and left_bytes > 0:
            left_bytes -= self._take_some(self._ready.popleft(), min(left_bytes, _STREAM_BYTES))

    def _take_some(self, stream: _Stream, max_bytes: int) -> int:
        """Take messages of a stream until ``max_bytes`` are reached; return how many bytes.

        The descriptor shows nothing more of a socket until it was seen empty: one that was not
        goes back into the queue.
        """
        taken_bytes = 0
        stream.is_ready = False
        try:
            while not stream.ended.done():
                frames = _receive(stream.socket)
                taken_bytes += _MESSAGE_BYTES + len(frames[-1])
                stream.heard_s = time.monotonic()
                if not stream.take(frames):
                    stream.ended.set_result(None)
                elif taken_bytes >= max_bytes:
                    self._queue(stream)
                    break
                elif not cast("int", stream.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    break
        except zmq.Again:
            pass
        except Exception as error:  # noqa: BLE001 - raised where the stream is awaited
            stream.ended.set_exception(error)
        return taken_bytes


def _receive(socket: zmq.SyncSocket) -> list[bytes]:
    """Return a message's frames; raise `zmq.Again` if there is none.

    It costs half as much as pyzmq's ``recv_multipart``, which asks the socket whether a frame
    follows.
    """
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames
