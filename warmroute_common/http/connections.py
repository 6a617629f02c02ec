"""Clients' connections: what comes over them that is no request, and when an idle one is closed."""

import asyncio
import logging
import socket
from functools import partial
from ssl import SSLContext
from typing import Any, Final

from aiohttp import web
from aiohttp.http import RawRequestMessage

from warmroute_common.api_errors import BadRequestError
from warmroute_common.http.boundary import error_response

log = logging.getLogger("warmroute.http")

_BACKLOG: Final = 1024
_UNSENT_BYTES: Final = 128 << 10
"""Kept by the kernel for a client that does not take them. By default it keeps 4 MB for each, and
slows all connections of a machine down when slow clients have it keep too much."""


class Connection(web.RequestHandler):
    """aiohttp's, but what it cannot parse is a line in the log and an answer in OpenAI's shape.

    Of such bytes the log has their kind alone: they may be of a prompt or a key.
    """

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes; end the body that is being read where they break its encoding.

        aiohttp's own parser (3.14) would leave the handler waiting for the rest.
        """
        super().data_received(data)
        if (
            self._messages
            and self._current_request is not None
            and not isinstance(self._messages[-1][0], RawRequestMessage)
            and not (body := self._current_request.content).is_eof()
        ):
            body.set_exception(web.RequestPayloadError())
            body.feed_eof()
            self.close()  # once that is answered

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed, and close the connection."""
        # Before any handler aiohttp itself writes what a header says into its answer.
        is_no_text = isinstance(exc, UnicodeEncodeError)
        if status != 400 and not is_no_text:
            return super().handle_error(request, status, exc, message)
        log.info("%s sent no valid HTTP (%s)", request.remote, type(exc).__name__)
        said = "a header is no text" if is_no_text else message or ""
        said = said.partition("\n")[0].rstrip(":")
        response = error_response(
            request.path,
            BadRequestError(f"this is no valid HTTP request: {said}", code="invalid_http"),
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Write one line; handlers' own errors have been told of before."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):  # found out after the answer
            log.info("a body was not encoded as its headers said; the connection is closed")
            return
        if isinstance(error, ConnectionResetError):  # found out when its answer was written
            log.info("a client left before it was answered")
            return
        kind = type(error).__name__
        log.warning("%s (%s); the connection is closed", args[0] % args[1:], kind)


class Site(web.TCPSite):
    """Where an application listens."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        idle_s: float,
        tls: SSLContext | None = None,
    ) -> None:
        """A connection is closed after ``idle_s`` between requests or amid a request's headers."""
        super().__init__(runner, host, port, ssl_context=tls, backlog=_BACKLOG)
        # aiohttp starts this one timer with the connection and after each answer, and stops it
        # only for a request whose headers are here: it bounds slow headers as well.
        assert runner.server is not None
        self._connection = partial(
            Connection,
            runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is what turns it off
            keepalive_timeout=idle_s,
        )

    async def start(self) -> None:
        """Begin to listen; raise OSError where that cannot be."""
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
        )
        # The connections that are accepted have it from here.
        for each in self._server.sockets if hasattr(socket, "TCP_NOTSENT_LOWAT") else ():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
