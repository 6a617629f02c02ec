"""The least that a client of Redis can do: what the remote tier is measured against."""

import socket
from collections.abc import Sequence
from typing import Final

from cacheengine.tiers.base import Chunk

_PARTS_AT_ONCE: Final = 512


class BareRedis:
    """One connection that pipelines SET and GET of values of one size.

    Nothing is checked but that the answers have the right length, nothing is
    timed out, and nothing can be missing.
    """

    def __init__(self, port: int, value_bytes: int) -> None:
        self._value_bytes = value_bytes
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, chunks: Sequence[Chunk]) -> None:
        """Store the values under the hex of their keys."""
        parts: list[bytes | memoryview] = []
        for key, content in chunks:
            name = key.hex().encode()
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(content))
            parts += [head, content, b"\r\n"]
        self._send(parts)
        self._receive(memoryview(bytearray(len(b"+OK\r\n") * len(chunks))))

    def get(self, chunks: Sequence[Chunk]) -> None:
        """Read the values into their places."""
        names = [key.hex().encode() for key, _ in chunks]
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names])
        head = memoryview(bytearray(len(b"$%d\r\n" % self._value_bytes)))
        end = memoryview(bytearray(2))
        for _, into in chunks:
            for part in (head, into, end):
                self._receive(part)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._socket.sendmsg(left[:_PARTS_AT_ONCE])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def _receive(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the server closed the connection")
            into = into[count:]
