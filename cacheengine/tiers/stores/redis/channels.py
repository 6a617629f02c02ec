"""A byte stream to a server, plain or under TLS, with a deadline for everything.

Every method raises OSError for what goes wrong, `TimeoutError` for the
deadline's end, and `ConnectionError` where the other side has closed. After
any of them the channel is of no more use.
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

Part = memoryview | bytes

_MAX_PARTS: Final = 512
"""Parts of one call to the system, which takes 1024."""
_SMALL_BYTES: Final = 16 * 1024
"""A record of TLS: smaller parts that follow each other are sent as one."""
_SECONDS_MICROSECONDS: Final = struct.Struct("@ll")


class Deadline:
    """A moment after which nothing is waited for."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    def extend(self, seconds: float) -> None:
        """Move it later."""
        self.timeout_s += seconds
        self._at_s += seconds

    def at_most(self, timeout_s: float) -> "Deadline":
        """Return this moment, or the one after ``timeout_s`` if that is sooner."""
        return Deadline(min(self.left_s(), timeout_s))

    def left_s(self) -> float:
        """Return the seconds that are left; raise `TimeoutError` when none are."""
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def patience_s(self) -> float:
        """Return the seconds that are left, 0 when none are."""
        return max(0.0, self._at_s - time.monotonic())


class ServerChannel(ABC):
    """One connection; used by one thread at a time, but for `abort`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @abstractmethod
    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Send the parts, one after the other."""

    @abstractmethod
    def receive(self, into: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; return how many of them, at least one, are now in ``into``."""

    def receive_all(self, into: memoryview, deadline: Deadline) -> None:
        """Fill ``into``."""
        while into:
            into = into[self.receive(into, deadline) :]

    def is_stale(self) -> bool:
        """Whether the other side has closed, or sent what was not asked for."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def abort(self) -> None:
        """Make a call that waits in another thread fail at once."""
        # The class's own method: that of ssl would pull the session from under that thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close without a farewell."""
        with contextlib.suppress(OSError):
            self._socket.close()


class PlainChannel(ServerChannel):
    """TCP or a unix socket. The system itself waits and keeps the time.

    That spares the two calls for each piece that Python's own timeouts cost,
    and lets one call fill a whole chunk: nearly twice the throughput.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        connected.setblocking(True)

    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Gather the parts in the kernel: nothing is copied before."""
        left = [memoryview(part) for part in parts if part]
        left.reverse()
        while left:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(left[: -_MAX_PARTS - 1 : -1])
            except BlockingIOError:
                continue  # the time that the system kept is over; so is the deadline
            _advance(left, sent)

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        """Wait for some bytes."""
        return self._receive(into, deadline, 0)

    def receive_all(self, into: memoryview, deadline: Deadline) -> None:
        """Fill ``into``, as a rule with one call."""
        while into:
            into = into[self._receive(into, deadline, socket.MSG_WAITALL) :]

    def _receive(self, into: memoryview, deadline: Deadline, flags: int) -> int:
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                return _not_closed(self._socket.recv_into(into, 0, flags))
            except BlockingIOError:
                continue

    def _limit(self, option: int, deadline: Deadline) -> None:
        # At least a millisecond: zero would mean for ever.
        left_us = int(deadline.left_s() * 1e6) + 1000
        timeval = _SECONDS_MICROSECONDS.pack(*divmod(left_us, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class TlsChannel(ServerChannel):
    """TLS over TCP."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._tls = connected

    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Encrypt and send."""
        for part in _joined(parts):
            view = memoryview(part)
            while view:
                self._tls.settimeout(deadline.left_s())
                view = view[self._tls.send(view) :]

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        """Wait for some bytes."""
        self._tls.settimeout(deadline.left_s())
        return _not_closed(self._tls.recv_into(into))

    def is_stale(self) -> bool:
        """Whether there is anything to read, decrypted already or not."""
        return self._tls.pending() > 0 or super().is_stale()


def _advance(left: list[memoryview], sent: int) -> None:
    """Take from the end of ``left`` what has been sent."""
    while left and sent >= len(left[-1]):
        sent -= len(left.pop())
    if sent:
        left[-1] = left[-1][sent:]


def _not_closed(received: int) -> int:
    if received == 0:
        raise ConnectionError("the server closed the connection")
    return received


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with small ones that follow each other made one."""
    result: list[Part] = []
    small: list[Part] = []
    for part in parts:
        if len(part) < _SMALL_BYTES:
            small.append(part)
            continue
        result += [b"".join(small), part]
        small = []
    return [*result, b"".join(small)]
