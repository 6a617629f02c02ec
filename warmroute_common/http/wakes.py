"""A body that comes a few bytes at a time does not wake the router for each of them."""

import socket
from contextlib import suppress
from typing import Final

from aiohttp import hdrs, web

_AT_ONCE_BYTES: Final = 64 * 1024
"""Of a body that is longer: what has come is to be read before the connection's buffer is full."""


class Wakes:
    """Sets how many bytes of one request's body make its connection readable (SO_RCVLOWAT).

    Without it, thousands of slow clients take the event loop's time from all others. The kernel
    wakes the router sooner where the client ends, or where the buffer is full.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._low_water_bytes = 1

    def received(self, size_bytes: int) -> None:
        """Note how much of the body was read: the next wake is for the rest, or a large part."""
        left_bytes = (self._request.content_length or 0) - size_bytes
        self._set(max(1, min(left_bytes, _AT_ONCE_BYTES)))

    def end(self) -> None:
        """Have the connection's next request wake the router by its first byte."""
        self._set(1)

    def _set(self, low_water_bytes: int) -> None:
        if low_water_bytes == self._low_water_bytes:
            return
        self._low_water_bytes = low_water_bytes
        made = _countable_socket(self._request)
        # A connection that has been closed is an OSError, or uvloop's own: a negative file number.
        with suppress(OSError, ValueError):
            if made is not None:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)


def _countable_socket(request: web.Request) -> socket.socket | None:
    """Return the socket over which exactly the bytes come that are still to be read of a body."""
    transport = request.transport
    if transport is None or hdrs.CONTENT_ENCODING in request.headers:
        return None  # the body is read decoded, and its size says nothing of what is to come
    if transport.get_extra_info("ssl_object") is not None:
        return None  # of a record that was read in part less is to come than it has text
    found: socket.socket | None = transport.get_extra_info("socket")
    return found
