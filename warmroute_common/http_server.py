"""An HTTP server that withstands bad clients: slow or malformed requests, large bodies, idle ones.

`Site` listens. `read_body` reads a body within the limits of `Bodies`. The middleware of
`ErrorAnswers` turns every error into an answer in the shape that the server's clients parse.
`announce_leaving` warns clients before the server stops, and `send_request_ids` names each answer.
"""

import asyncio
import logging
import socket
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext
from typing import Any, Final

import orjson
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.typedefs import Handler

from warmroute_common.api_errors import (
    ApiError,
    BadRequestError,
    ExpectationFailedError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    TooSlowError,
)

_BACKLOG: Final = 1024
_UNSENT_BYTES: Final = 128 << 10
"""The kernel's send buffer for a client that does not read. The default is 4 MB a connection, and
many slow clients with full buffers slow down every connection of the machine."""
_LOW_WATER_BYTES: Final = 64 << 10
"""The longest part of a body that the kernel collects before it wakes the server."""


# Errors as answers


class ErrorAnswers:
    """Turns errors into answers in the shape of OpenAI's or, by path, Anthropic's API."""

    server = "router"
    """How the answers name the server."""
    log = logging.getLogger("warmroute")
    connection_log = logging.getLogger("warmroute.http")

    def body(self, path: str, error: ApiError) -> bytes:
        """Return an error's body."""
        return error_body(path, error)

    def response(self, path: str, error: ApiError) -> web.Response:
        """Return an error as a whole answer."""
        return web.Response(
            status=error.status,
            body=self.body(path, error),
            content_type="application/json",
            headers=error.headers,
        )

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors, and release the request's body at the end."""
        try:
            return await handler(request)
        except ApiError as error:
            response = self.response(request.path, error)
            if leaves_body(error):
                response.force_close()
            return response
        except web.HTTPNotFound:
            message = f"the {self.server} has no endpoint {request.method} {request.path}"
            return self.response(request.path, NotFoundError(message))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allowed}, not {request.method}"
            response = self.response(request.path, MethodNotAllowedError(message))
            response.headers["Allow"] = allowed
            return response
        except ConnectionResetError:
            raise  # the client has left: no answer reaches it
        except Exception as error:  # noqa: BLE001
            return self.response(
                request.path, self.defect(f"{request.method} {request.path}", error)
            )
        finally:
            release_body(request)

    def defect(self, what: str, error: Exception) -> ApiError:
        """Log an unexpected error; return the error that the client gets.

        The log gets the stack trace without the exception's text, which may quote a prompt.
        """
        frames = traceback.extract_tb(error.__traceback__)
        trace = "; ".join(
            f"{each.name} ({each.filename}:{each.lineno}: {each.line})" for each in frames
        )
        self.log.error("%s failed: %s in %s", what, type(error).__name__, trace)
        return ApiError(f"the {self.server} failed; see its log")


ROUTER_ERRORS: Final = ErrorAnswers()
errors_answered: Final = ROUTER_ERRORS.middleware
defect: Final = ROUTER_ERRORS.defect


def leaves_body(error: ApiError) -> bool:
    """Whether the rest of a body may still come, so that the connection has to be closed."""
    return isinstance(error, TooLargeError | TooSlowError | OverloadedError)


def is_anthropic(path: str) -> bool:
    """Whether a path's clients parse Anthropic's errors."""
    return path.startswith("/v1/messages")


def error_body(path: str, error: ApiError) -> bytes:
    """Return an error in the shape that the path's clients parse."""
    return orjson.dumps(error.anthropic_body() if is_anthropic(path) else error.openai_body())


def as_json(value: object, status: int = 200) -> web.Response:
    """Return a value as a response."""
    body = orjson.dumps(value, default=str)
    return web.Response(status=status, body=body, content_type="application/json")


# Bodies


@dataclass(kw_only=True)
class Bodies:
    """Limits of request bodies, and the memory that they take now."""

    within_s: float
    """How long one body may take to arrive."""
    limit_bytes: int
    """For all bodies that are being read, or were read and are not released yet."""
    each_hint: str = "max_body_bytes in the router's configuration"
    """The setting for the size of one body (``client_max_size`` of the application)."""
    all_hint: str = "max_bodies_bytes in the router's configuration"
    """The setting for ``limit_bytes``."""
    held_bytes: int = 0

    def hold(self, size_bytes: int) -> None:
        """Count memory until `release`; raise `OverloadedError` where there is not enough."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise OverloadedError(
                f"the memory for request bodies is full ({self.all_hint}); send the request again "
                "later"
            )
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Stop counting memory."""
        self.held_bytes -= size_bytes

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Count memory for the block; raise `OverloadedError`."""
        self.hold(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)


BODIES: Final = web.AppKey("bodies", Bodies)
"""Required in every application whose handlers call `read_body`."""
_HELD_BYTES: Final = web.RequestKey("held_bytes", int)
_EXPECTS_CONTINUE: Final = web.RequestKey("expects_continue", bool)
_SHOWN_CHARS: Final = 100


async def read_body(request: web.Request) -> bytes | bytearray:
    """Return the body, which nobody changes. It counts as held until `release_body`.

    Raises `TooLargeError` as soon as the size is known to exceed ``client_max_size``,
    `TooSlowError`, `OverloadedError`, and `BadRequestError` for a broken encoding.
    """
    bodies, wakes = request.app[BODIES], _Wakes(request)
    announced, limit_bytes = request.content_length, request.client_max_size
    if announced is not None and announced > limit_bytes:
        raise _too_large(bodies, limit_bytes, f"{announced} bytes were announced")
    await _continue(request)
    # Most bodies have arrived with their headers, and a timer is the largest cost here.
    has_arrived = request.content.is_eof()
    try:
        async with nullcontext() if has_arrived else asyncio.timeout(bodies.within_s):
            return await _read(request, bodies, limit_bytes, wakes)
    except TimeoutError:
        raise TooSlowError(f"the body did not come whole within {bodies.within_s:g} s") from None
    except web.RequestPayloadError:
        raise BadRequestError(
            "the body is not encoded as its Content-Encoding and Transfer-Encoding say"
        ) from None
    finally:
        wakes.end()


def release_body(request: web.Request) -> None:
    """Stop counting a request's body as held. Idempotent; also where none was read."""
    if held_bytes := request.pop(_HELD_BYTES, 0):
        request.app[BODIES].release(held_bytes)


async def expect_later(request: web.Request) -> web.StreamResponse | None:
    """Refuse an unknown ``Expect``; note ``100-continue`` for `read_body`.

    For each route as its ``expect_handler``: aiohttp's own one asks for the body before the client
    has been admitted.
    """
    if request.version < HttpVersion11:
        return None
    expected = request.headers[hdrs.EXPECT]
    if expected.lower() == "100-continue":
        request[_EXPECTS_CONTINUE] = True
        return None
    error = ExpectationFailedError(
        f"the header 'Expect: {expected[:_SHOWN_CHARS]}' is not known; only 100-continue is"
    )
    return ROUTER_ERRORS.response(request.path, error)


def expecting_later(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """Return routes with `expect_later`."""
    return [
        web.RouteDef(each.method, each.path, each.handler, {"expect_handler": expect_later})
        for each in routes
    ]


async def _continue(request: web.Request) -> None:
    """Ask for the body, if the client waits for that."""
    if request.pop(_EXPECTS_CONTINUE, False) and not request.content.is_eof():
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
        await request.writer.drain()


async def _read(
    request: web.Request, bodies: Bodies, limit_bytes: int, wakes: "_Wakes"
) -> bytes | bytearray:
    first, body, size = b"", bytearray(), 0
    # request.read() would keep the body as long as the request.
    while chunk := await request.content.readany():
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(bodies, limit_bytes, "more was sent")
        bodies.hold(len(chunk))
        request[_HELD_BYTES] = size
        # To join parts of a large body would hold the event loop, and take the memory twice.
        if not first:
            first = chunk
        else:
            body += chunk if body else first + chunk
        wakes.received(size)
    return body or first


def _too_large(bodies: Bodies, limit_bytes: int, what: str) -> TooLargeError:
    return TooLargeError(f"the body may have {limit_bytes} bytes and {what} ({bodies.each_hint})")


class _Wakes:
    """Sets how many bytes of one request's body make its connection readable (SO_RCVLOWAT).

    Without it, thousands of slow clients that send a few bytes at a time take the event loop's time
    from all others. The kernel wakes the server earlier when the client closes its end, or when
    the receive buffer is full.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._low_water_bytes = 1

    def received(self, size_bytes: int) -> None:
        """Note how much of the body was read: the next wake is for the rest, or a large part."""
        left_bytes = (self._request.content_length or 0) - size_bytes
        self._set(max(1, min(left_bytes, _LOW_WATER_BYTES)))

    def end(self) -> None:
        """Let the connection's next request wake the server with its first byte."""
        self._set(1)

    def _set(self, low_water_bytes: int) -> None:
        if low_water_bytes == self._low_water_bytes:
            return
        self._low_water_bytes = low_water_bytes
        made = _body_socket(self._request)
        # A closed connection raises OSError or, in uvloop, ValueError for its negative file number.
        with suppress(OSError, ValueError):
            if made is not None:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)


def _body_socket(request: web.Request) -> socket.socket | None:
    """Return the socket, if its bytes are exactly the bytes of the body that are still to come."""
    transport = request.transport
    if transport is None or hdrs.CONTENT_ENCODING in request.headers:
        return None  # the body is read decoded: its size does not say how many bytes will come
    if transport.get_extra_info("ssl_object") is not None:
        return None  # part of a TLS record may have been read already
    found: socket.socket | None = transport.get_extra_info("socket")
    return found


# Connections


class Connection(web.RequestHandler):
    """aiohttp's connection, with unparsable input logged in one line and answered as an API error.

    The log names only the kind of the bytes, which may belong to a prompt or a key.
    """

    __slots__ = ("_errors",)

    def __init__(self, *args: Any, errors: ErrorAnswers = ROUTER_ERRORS, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._errors = errors

    def data_received(self, data: bytes) -> None:
        """Take bytes; end the body that is being read if they break its encoding.

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
            self.close()  # after the answer to it

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer input that could not be parsed, and close the connection."""
        # A UnicodeEncodeError: aiohttp writes a header's text into an answer of its own.
        is_bad_header = isinstance(exc, UnicodeEncodeError)
        if status != 400 and not is_bad_header:
            return super().handle_error(request, status, exc, message)
        self._errors.connection_log.info(
            "%s sent invalid HTTP (%s)", request.remote, type(exc).__name__
        )
        why = "a header is not valid text" if is_bad_header else message or ""
        why = why.partition("\n")[0].rstrip(":")
        response = self._errors.response(
            request.path, BadRequestError(f"invalid HTTP request: {why}", code="invalid_http")
        )
        response.headers[REQUEST_ID_HEADER] = request_id_from(None)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Write one line: handlers have logged their own errors already."""
        error, log = kw.get("exc_info"), self._errors.connection_log
        if isinstance(error, web.RequestPayloadError):  # seen after the answer
            log.info("a body was not encoded as its headers said; the connection is closed")
            return
        if isinstance(error, ConnectionResetError):  # seen while the answer was written
            log.info("a client left before it was answered")
            return
        kind = type(error).__name__
        log.warning("%s (%s); the connection is closed", args[0] % args[1:], kind)


class Site(web.TCPSite):
    """An address that an application listens on."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        idle_s: float,
        tls: SSLContext | None = None,
        errors: ErrorAnswers = ROUTER_ERRORS,
    ) -> None:
        """Close connections after ``idle_s`` between requests or within a request's headers."""
        super().__init__(runner, host, port, ssl_context=tls, backlog=_BACKLOG)
        # aiohttp starts the keep-alive timer with the connection and after each answer, and stops
        # it only when a request's headers are complete: it bounds slow headers as well.
        assert runner.server is not None
        self._connection = partial(
            Connection,
            runner.server,
            errors=errors,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=idle_s,
        )

    async def start(self) -> None:
        """Begin to listen; raise OSError if the address cannot be used."""
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
        )
        # Accepted connections inherit the option.
        for each in self._server.sockets if hasattr(socket, "TCP_NOTSENT_LOWAT") else ():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


# Leaving


@dataclass(kw_only=True)
class Leaving:
    """Whether an application's server is about to stop."""

    has_begun: bool = False


LEAVING: Final = web.AppKey("leaving", Leaving)
"""Present in every application with `announce_leaving`."""


def announce_leaving(app: web.Application) -> None:
    """Send ``Connection: close`` with every answer once ``app[LEAVING].has_begun`` is set.

    A server may close a client's connection between two requests. A request that is being sent
    at that moment is lost, and its client cannot know whether it was read. So clients
    learn it from their last answer, and load balancers from the health endpoint.
    """
    leaving = app[LEAVING] = Leaving()

    async def close_connection(_: web.Request, response: web.StreamResponse) -> None:
        if leaving.has_begun:
            response.force_close()
            response.headers["Connection"] = "close"

    app.on_response_prepare.append(close_connection)


# Request ids

REQUEST_ID_HEADER: Final = "X-Request-Id"
_MOST_ID_CHARS: Final = 256
_REQUEST_ID: Final = web.RequestKey("request_id", str)


def request_id_from(sent: str | None) -> str:
    """Return a client's own id for its request, if it has one that can be sent on; else a new one.

    An id has at most 256 characters, all of them printable.
    """
    is_usable = sent and len(sent) <= _MOST_ID_CHARS and sent.isprintable()
    return sent if sent and is_usable else uuid.uuid4().hex


def request_id(request: web.Request) -> str:
    """Return the id of a request: the same one for its whole life."""
    if (known := request.get(_REQUEST_ID)) is None:
        known = request[_REQUEST_ID] = request_id_from(request.headers.get(REQUEST_ID_HEADER))
    return known


def send_request_ids(app: web.Application) -> None:
    """Send ``X-Request-Id`` with every answer of an application, errors included."""

    async def add_id(request: web.Request, response: web.StreamResponse) -> None:
        if REQUEST_ID_HEADER not in response.headers:
            response.headers[REQUEST_ID_HEADER] = request_id(request)

    app.on_response_prepare.append(add_id)
