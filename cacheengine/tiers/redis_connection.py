"""A connection to a Redis or Valkey server.

valkey-py connects, encrypts and logs in. Everything else is read and sent here, on its socket:
commands are sent as parts from where they lie in memory, and values are received straight into
their targets. Every method raises OSError for faults, `TimeoutError` at the deadline, and
`ConnectionError` if the server has closed. After any of these, and after a `RespError`, the
connection must not be used again: the next bytes could answer another command.
"""

import contextlib
import select
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from valkey.connection import AbstractConnection, Connection

from cacheengine.tiers.store import SLOWEST_BYTES_S, Deadline

Part = memoryview | bytes

_MAX_PARTS: Final = 512
"""Parts in one system call, which accepts 1024."""
_SMALL_BYTES: Final = 16 * 1024
"""The size of a TLS record: consecutive smaller parts are sent as one."""
_SECONDS_MICROSECONDS: Final = struct.Struct("@ll")


class ServerChannel(ABC):
    """One connection. One thread uses it at a time; any thread may call `abort`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @abstractmethod
    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Send the parts, one after the other."""

    @abstractmethod
    def receive(self, into: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; return how many of them, at least one, are now in ``into``."""

    def receive_all(self, into: memoryview, deadline: Deadline) -> None:
        while into:
            into = into[self.receive(into, deadline) :]

    def is_stale(self) -> bool:
        """Whether the server has closed, or sent bytes that nobody asked for."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def abort(self) -> None:
        """Make a call that waits in another thread fail at once."""
        # Not the method of SSLSocket: it would drop the session while that thread uses it.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class PlainChannel(ServerChannel):
    """TCP or a unix socket. The kernel waits and enforces the timeout.

    Python's timeouts cost two system calls for each piece. Without them one call fills a whole
    chunk: nearly twice the throughput.
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
                continue  # the kernel's timeout is over, and so is the deadline
            _advance(left, sent)

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        return self._receive(into, deadline, 0)

    def receive_all(self, into: memoryview, deadline: Deadline) -> None:
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
        # At least a millisecond: zero would mean no timeout.
        left_us = int(deadline.left_s() * 1e6) + 1000
        timeval = _SECONDS_MICROSECONDS.pack(*divmod(left_us, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class TlsChannel(ServerChannel):
    """TLS over TCP."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._tls = connected

    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        for part in _joined(parts):
            view = memoryview(part)
            while view:
                self._tls.settimeout(deadline.left_s())
                view = view[self._tls.send(view) :]

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        self._tls.settimeout(deadline.left_s())
        return _not_closed(self._tls.recv_into(into))

    def is_stale(self) -> bool:
        """Whether there is anything to read, decrypted already or not."""
        return self._tls.pending() > 0 or super().is_stale()


def _advance(left: list[memoryview], sent: int) -> None:
    """Remove the bytes that were sent from the end of ``left``."""
    while left and sent >= len(left[-1]):
        sent -= len(left.pop())
    if sent:
        left[-1] = left[-1][sent:]


def _not_closed(received: int) -> int:
    if received == 0:
        raise ConnectionError("the server closed the connection")
    return received


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts, with consecutive small ones joined."""
    result: list[Part] = []
    small: list[Part] = []
    for part in parts:
        if len(part) < _SMALL_BYTES:
            small.append(part)
            continue
        result += [b"".join(small), part]
        small = []
    return [*result, b"".join(small)]


_LINE_BYTES: Final = 4096
"""Bytes of the read-ahead buffer for protocol lines; no line may be longer."""
MAX_VALUE_BYTES: Final = 512 * 1024 * 1024
"""The protocol's limit for a value, unless the server's operator raises it."""
_DRAIN_BYTES: Final = 256 * 1024


class RespError(Exception):
    """The server's answer is not valid RESP, or does not fit the command."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the server answered to one command."""

    code: str
    """Its first word, such as OOM."""
    text: str
    """All of it, printable and of bounded length."""


def command(*words: str) -> bytes:
    """Return a short command."""
    return b"".join([b"*%d\r\n" % len(words), *(_bulk(word.encode()) for word in words)])


def set_command(name: str, parts: Sequence[Part], *, ttl_s: int) -> list[Part]:
    """Return the command that stores a value for ``ttl_s`` (0: no limit), without copying parts."""
    size_bytes = sum(map(len, parts))
    expiry = b"".join(map(_bulk, (b"EX", b"%d" % ttl_s))) if ttl_s else b""
    words = 5 if ttl_s else 3
    head = b"*%d\r\n$3\r\nSET\r\n%s$%d\r\n" % (words, _bulk(name.encode()), size_bytes)
    return [head, *parts, b"\r\n" + expiry]


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


class RefusedError(Exception):
    """The server refused the login."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class TlsConnection(Connection):
    """valkey-py's connection, under TLS with a context of ours.

    Its own TLS connection trusts the system's authorities in addition to those of
    ``tls_ca_file``, and reads all certificates again for each connection.
    """

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._context = context

    def _connect(self) -> ssl.SSLSocket:
        plain: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return self._context.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


class Conversation:
    """Commands and replies on one connection, in order. It is the connection's parser, too.

    ``deadline`` bounds all calls. The thread that borrows the conversation sets it.
    """

    must_close = False
    """Whether the connection is closed when it is given back: its server takes no writes now."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._ahead = memoryview(bytearray(_LINE_BYTES))
        self._start = self._end = 0
        self._connection: AbstractConnection | None = None
        self._channel: ServerChannel

    def open(self, kind: Callable[..., AbstractConnection], **options: Any) -> None:
        """Connect and log in with a connection of this kind; ``options`` are valkey-py's.

        Raises `RefusedError` for a refused login, what valkey-py raises otherwise.
        """
        self._connection = kind(
            # Each of the two would cost a round trip.
            lib_name=None,
            lib_version=None,
            parser_class=lambda socket_read_size: self,
            **options,
        )
        self._connection.connect()  # type: ignore[no-untyped-call]

    def on_connect(self, connection: AbstractConnection) -> None:
        """Take over the socket of the connection: valkey-py calls this before the login."""
        connected = connection._sock
        assert connected is not None
        if isinstance(connected, ssl.SSLSocket):
            self._channel = TlsChannel(connected)
        else:
            self._channel = PlainChannel(connected)

    def on_disconnect(self) -> None:
        """Part of valkey-py's interface of a parser."""

    def read_response(self, disable_decoding: bool = False) -> str:
        """Return the answer to the login: valkey-py reads nothing else."""
        reply = self.simple()
        if isinstance(reply, Refusal):
            raise RefusedError(reply)
        return reply

    def send(self, parts: Sequence[Part]) -> None:
        self._channel.send(parts, self.deadline)

    def simple(self) -> str | Refusal:
        """Read a reply that is a word, such as OK."""
        return self._expect(b"+")

    def integer(self) -> int | Refusal:
        """Read a reply that is a number."""
        reply = self._expect(b":")
        return reply if isinstance(reply, Refusal) else _number(reply)

    def scanned(self) -> tuple[str, list[str]] | Refusal:
        """Read the reply to SCAN: the cursor to continue with, "0" at the end, and names."""
        reply = self._expect(b"*")
        if isinstance(reply, Refusal):
            return reply
        cursor = self._text()
        return cursor, [self._text() for _ in range(_number(str(self._expect(b"*"))))]

    def _text(self) -> str:
        size_bytes = _number(str(self._expect(b"$")))
        if not 0 <= size_bytes <= _LINE_BYTES:
            raise RespError(f"a name of {size_bytes} bytes")
        text = bytearray(size_bytes)
        self._fill(memoryview(text))
        self._end_of_value()
        return text.decode("latin-1")

    def value(self, into: Iterable[memoryview]) -> int | Refusal | None:
        """Read a reply that is a value; return its size, None for one that is not there.

        Bytes that do not fit into the parts are discarded; the deadline is extended by the time
        for them.
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
        return self._start < self._end or self._channel.is_stale()

    def abort(self) -> None:
        self._channel.abort()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _expect(self, kind: bytes) -> str | Refusal:
        line = self._line()
        if line[:1] == kind:
            return line[1:].decode("latin-1")
        if line[:1] == b"-":
            return _refusal(line[1:])
        # The message does not quote it: it may echo what was sent, passwords included.
        raise RespError("an answer of another type than the command's")

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
                raise RespError("a line is too long")
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
        self.deadline.extend(left_bytes / SLOWEST_BYTES_S)
        scratch = memoryview(bytearray(min(left_bytes, _DRAIN_BYTES)))
        while left_bytes:
            piece = scratch[:left_bytes]
            self._fill(piece)
            left_bytes -= len(piece)

    def _end_of_value(self) -> None:
        if self._line():
            raise RespError("a value is longer than its size")


def _refusal(line: bytes) -> Refusal:
    text = "".join(each if each.isprintable() else "?" for each in line[:200].decode("latin-1"))
    return Refusal(text.partition(" ")[0], text)


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise RespError("a number is malformed")
    return int(text)
