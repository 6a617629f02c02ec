"""RESP, the protocol of Redis and Valkey, as far as a cache needs it.

Commands are written as parts that are sent from where they lie; a value is
received straight into its target. Whatever is not understood is a
`RespError`, after which a connection must not be used again: what follows
could be the answer to another question.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cacheengine.tiers.stores.redis.channels import Deadline, Part, ServerChannel

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
