"""A socket on which every wait ends, and bytes go straight to and from the pool."""

import contextlib
import select
import socket
import struct
import time


class PeerGoneError(Exception):
    """The connection ended in the middle of something."""


class Channel:
    """A connected socket on which every message must go through within ``timeout_s``.

    Blocks in the kernel, not in Python: a chunk is one system call, and the
    other threads of the process run meanwhile. Calls raise TimeoutError,
    `PeerGoneError` or another OSError. `shut` may be called from any thread and
    wakes the one that waits; the rest is for one thread.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own timeouts: Python's would make the socket
        # non-blocking, and each chunk many calls.
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @classmethod
    def connect(cls, address: tuple[str, int], *, timeout_s: float, connect_s: float) -> "Channel":
        """Connect within ``connect_s``."""
        connected = socket.create_connection(address, timeout=connect_s)
        try:
            return cls(connected, timeout_s)
        except BaseException:
            connected.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts, in order, none copied."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        deadline_s = time.monotonic() + self._timeout_s
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                sent = 0
            left = _after(left, sent)
            if left:
                # The kernel's timeout cuts a call short as well; without this
                # check a peer that takes a byte at a time would hold us for ever.
                self._check(deadline_s, "did not take what was sent")

    def receive_parts(self, *parts: memoryview) -> int:
        """Fill buffers, in order; return the bytes received, fewer only if the other side ended."""
        left = [part for part in parts if len(part)]
        total = 0
        deadline_s = time.monotonic() + self._timeout_s
        while left:
            try:
                received = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check(deadline_s, "sent nothing")
                continue
            if received == 0:
                break
            total += received
            left = _after(left, received)
            if left:
                self._check(deadline_s, "did not finish a message")
        return total

    def receive(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        received = self.receive_or_end(num_bytes)
        if received is None:
            raise PeerGoneError("the connection was closed")
        return received

    def receive_or_end(self, num_bytes: int) -> bytes | None:
        """Return the next bytes; None if the other side ended the connection before them."""
        buffer = bytearray(num_bytes)
        received = self.receive_parts(memoryview(buffer))
        if 0 < received < num_bytes:
            raise PeerGoneError("the connection was closed in the middle of a message")
        return bytes(buffer) if received == num_bytes else None

    def has_input(self) -> bool:
        """Whether a receive would find something (or the end) at once."""
        poll = select.poll()  # select() itself fails for descriptors over 1024
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _check(self, deadline_s: float, what: str) -> None:
        # The kernel counts in ticks, and may wake a little early.
        if time.monotonic() > deadline_s - 0.01:
            raise TimeoutError(f"the other side {what} within {self._timeout_s:g} s")

    def end_sending(self) -> None:
        """Tell the other side that nothing more comes, and go on receiving."""
        self._socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection in both directions, waking a thread that waits on it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Idempotent."""
        self._socket.close()


def _after(parts: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what is left of buffers when so many bytes of them are done."""
    for position, part in enumerate(parts):
        if done_bytes < len(part):
            return [part[done_bytes:], *parts[position + 1 :]]
        done_bytes -= len(part)
    return []
