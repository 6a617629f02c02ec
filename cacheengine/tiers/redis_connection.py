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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cacheengine.tiers.store import Deadline

Part = memoryview | bytes

_MAX_PARTS: Final = 512
"""Parts of one call to the system, which takes 1024."""
_SMALL_BYTES: Final = 16 * 1024
"""A record of TLS: smaller parts that follow each other are sent as one."""
_SECONDS_MICROSECONDS: Final = struct.Struct("@ll")


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


# TODO of cacheengine.tiers.redis_connection: RESP, the protocol of Redis and Valkey, as far as a cache needs it.
#
# Commands are written as parts that are sent from where they lie; a value is
# received straight into its target. Whatever is not understood is a
# `RespError`, after which a connection must not be used again: what follows
# could be the answer to another question.

_LINE_BYTES: Final = 4096
"""Read ahead for a line of the protocol; no line may be longer."""
MAX_VALUE_BYTES: Final = 512 * 1024 * 1024
"""The protocol's own limit for a value, unless a server's operator raises it."""
_DRAIN_BYTES: Final = 256 * 1024


class RespError(Exception):
    """The other side does not speak RESP, or not to us."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the server answered to one command."""

    code: str
    """Its first word, such as OOM."""
    text: str
    """All of it, printable and of bounded length."""


def command(*words: str | bytes | Part) -> bytes:
    """Return a short command."""
    encoded = [word.encode() if isinstance(word, str) else bytes(word) for word in words]
    return b"".join([b"*%d\r\n" % len(encoded), *(_bulk(word) for word in encoded)])


def set_command(name: str, parts: Sequence[Part], *, ttl_s: int) -> list[Part]:
    """Return the command that stores a value for so long (0: for ever), its parts not copied."""
    size_bytes = sum(map(len, parts))
    expiry = b"".join(map(_bulk, (b"EX", b"%d" % ttl_s))) if ttl_s else b""
    words = 5 if ttl_s else 3
    head = b"*%d\r\n$3\r\nSET\r\n%s$%d\r\n" % (words, _bulk(name.encode()), size_bytes)
    return [head, *parts, b"\r\n" + expiry]


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


class Conversation:
    """Commands and replies on one channel, in order.

    ``deadline`` bounds all calls; the borrower of the conversation sets it.
    """

    def __init__(self, channel: ServerChannel, deadline: Deadline, *, drain_bytes_s: float) -> None:
        self.deadline = deadline
        self._channel = channel
        self._drain_bytes_s = drain_bytes_s
        self._ahead = memoryview(bytearray(_LINE_BYTES))
        self._start = self._end = 0

    def send(self, parts: Sequence[Part]) -> None:
        """Send commands."""
        self._channel.send(parts, self.deadline)

    def simple(self) -> str | Refusal:
        """Read a reply that is a word, such as OK."""
        return self._expect(b"+")

    def integer(self) -> int | Refusal:
        """Read a reply that is a number."""
        reply = self._expect(b":")
        return reply if isinstance(reply, Refusal) else _number(reply)

    def value(self, into: Iterable[memoryview]) -> int | Refusal | None:
        """Read a reply that is a value; return its size, None for one that is not there.

        What does not fit into the parts is thrown away, for which the
        deadline is moved by the time that this takes.
        """
        reply = self._expect(b"$")
        if isinstance(reply, Refusal):
            return reply
        size_bytes = _number(reply)
        if size_bytes == -1:
            return None
        if not 0 <= size_bytes <= MAX_VALUE_BYTES:
            raise RespError(f"a value of {size_bytes} bytes")
        left_bytes = size_bytes
        for part in into:
            piece = part[:left_bytes]
            self._fill(piece)
            left_bytes -= len(piece)
        self._drain(left_bytes)
        self._end_of_value()
        return size_bytes

    def is_stale(self) -> bool:
        """Whether there is something to read that was not asked for, or the other side is gone."""
        return self._start < self._end or self._channel.is_stale()

    def abort(self) -> None:
        """Make a call that waits in another thread fail at once."""
        self._channel.abort()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _expect(self, kind: bytes) -> str | Refusal:
        line = self._line()
        if line[:1] == kind:
            return line[1:].decode("latin-1")
        if line[:1] == b"-":
            return _refusal(line[1:])
        # Not what it says: it could be what we have sent, a password among it.
        raise RespError("an answer that is none to the command")

    def _line(self) -> bytes:
        """Return the next line, without its end."""
        while True:
            # Not found until the last byte is in: at most 4096 bytes are searched again.
            known = bytes(self._ahead[self._start : self._end])
            line, end, _ = known.partition(b"\r\n")
            if end:
                self._start += len(line) + len(end)
                return line
            if len(known) == _LINE_BYTES:
                raise RespError("a line that does not end")
            self._ahead[: len(known)] = known
            self._start, self._end = 0, len(known)
            self._end += self._channel.receive(self._ahead[self._end :], self.deadline)

    def _fill(self, into: memoryview) -> None:
        ready = min(len(into), self._end - self._start)
        into[:ready] = self._ahead[self._start : self._start + ready]
        self._start += ready
        if ready < len(into):
            self._channel.receive_all(into[ready:], self.deadline)

    def _drain(self, left_bytes: int) -> None:
        if not left_bytes:
            return
        self.deadline.extend(left_bytes / self._drain_bytes_s)
        scratch = memoryview(bytearray(min(left_bytes, _DRAIN_BYTES)))
        while left_bytes:
            piece = scratch[:left_bytes]
            self._fill(piece)
            left_bytes -= len(piece)

    def _end_of_value(self) -> None:
        if self._line():
            raise RespError("a value that is longer than its size")


def _refusal(line: bytes) -> Refusal:
    text = "".join(each if each.isprintable() else "?" for each in line[:200].decode("latin-1"))
    return Refusal(text.partition(" ")[0], text)


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise RespError("a number that is none")
    return int(text)
