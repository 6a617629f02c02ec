"""A body that comes a few bytes at a time does not wake the router for each of them."""

import socket
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
        self._announced_bytes = request.content_length or 0
        self._low_water_bytes = 1
        transport = request.transport
        # TLS: part of a record may have been read, and what is left of it is less than its text.
        # With an encoding the bytes that were read are not those that came.
        is_countable = (
            transport is not None
            and transport.get_extra_info("ssl_object") is None
            and hdrs.CONTENT_ENCODING not in request.headers
        )
        self._socket = (
            transport.get_extra_info("socket") if transport is not None and is_countable else None
        )

    def received(self, size_bytes: int) -> None:
        """Note how much of the body was read: the next wake is for the rest, or a large part."""
        left_bytes = self._announced_bytes - size_bytes
        self._set(max(1, min(left_bytes, _AT_ONCE_BYTES)))

    def end(self) -> None:
        """Have the connection's next request wake the router by its first byte."""
        self._set(1)

    def _set(self, low_water_bytes: int) -> None:
        if self._socket is None or low_water_bytes == self._low_water_bytes:
            return
        self._low_water_bytes = low_water_bytes
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
        except (OSError, ValueError):  # it has been closed; uvloop has no file number of it then
            self._socket = None
