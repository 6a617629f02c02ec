"""Requests over plain sockets: what no HTTP client would send, and answers read strictly."""

import http.client
import io
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

ANSWERS_S: Final = 20.0
"""No answer within this is a hang: routers here wait for bodies for a second."""


@dataclass(frozen=True, kw_only=True)
class Got:
    """An answer; without a status the connection was closed instead."""

    status: int | None
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Port:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Port":
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or 0)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=ANSWERS_S)

    def send(self, data: bytes, *, method: str = "POST", closes: bool = False) -> Got:
        """Send bytes; return the first answer. TimeoutError: there was none, nor an end.

        ``closes``: whether nothing more will come, which the server is told.
        """
        with self.connect() as connection:
            try:
                connection.sendall(data)
                if closes:
                    connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # answered, and closed, before all was sent
            return _answer(connection, method)

    def leave(self, data: bytes) -> None:
        """Send bytes and go."""
        with self.connect() as connection, suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)

    def all_answers(self, data: bytes) -> bytes:
        """Send bytes and nothing more; return all that comes until the connection ends."""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            found = io.BytesIO()
            try:
                while piece := connection.recv(65536):
                    found.write(piece)
            except ConnectionResetError:
                pass
            return found.getvalue()


def _answer(connection: socket.socket, method: str) -> Got:
    response = http.client.HTTPResponse(connection, method=method)
    try:
        response.begin()
        body = response.read()
    except TimeoutError:
        raise
    except (http.client.HTTPException, OSError):
        return Got(status=None, headers={}, body=b"")
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Got(status=response.status, headers=headers, body=body)


def request(
    path: str | bytes,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
    length: int | None = None,
) -> bytes:
    """Return a request as bytes; ``length`` is what it says of its body, where that is wrong."""
    target = path.encode() if isinstance(path, str) else path
    lines = [
        method.encode() + b" " + target + b" HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        *(name + b": " + value for name, value in headers),
    ]
    names = {name.lower() for name, _ in headers}
    if not names & {b"content-length", b"transfer-encoding"}:
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
