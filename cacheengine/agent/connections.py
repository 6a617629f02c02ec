"""The agent's connections: what comes over them that is no request, and when an idle one ends."""

import asyncio
import logging
from functools import partial
from typing import Any, Final

from aiohttp import web
from aiohttp.http import RawRequestMessage

logger = logging.getLogger("vllm.warmroute")

_BACKLOG: Final = 128
_IDLE_S: Final = 75.0
"""Between requests, or amid a request's headers."""


class Connection(web.RequestHandler):
    """aiohttp's, but what it cannot parse is a line in the log and an answer as JSON."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes; end the body that is being read where they break its encoding.

        aiohttp's own parser (3.14) would leave the handler waiting for the rest.
        """
        super().data_received(data)
        request = self._current_request
        if (
            self._messages
            and request is not None
            and not isinstance(self._messages[-1][0], RawRequestMessage)
            and not request.content.is_eof()
        ):
            request.content.set_exception(web.RequestPayloadError())
            request.content.feed_eof()
            self.close()

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
        logger.info("%s sent the agent no valid HTTP (%s)", request.remote, type(exc).__name__)
        said = "a header is no text" if is_no_text else message or ""
        said = said.partition("\n")[0].rstrip(":")
        response = web.json_response({"error": f"no valid HTTP request: {said}"}, status=400)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Write one line; handlers' own errors have been told of before."""
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):  # found out after the answer
            logger.info("a body was not encoded as its headers said; the connection is closed")
            return
        kind = type(error).__name__
        logger.warning("%s (%s); the connection is closed", args[0] % args[1:], kind)


class Site(web.TCPSite):
    """Where the agent listens."""

    async def start(self) -> None:
        """Begin to listen; raise OSError where that cannot be."""
        await web.BaseSite.start(self)
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        connection = partial(
            Connection,
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None is what turns it off
            keepalive_timeout=_IDLE_S,
        )
        self._server = await loop.create_server(
            connection, self._host, self._port, backlog=_BACKLOG
        )
