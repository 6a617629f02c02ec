"""Requests' bodies, read within their bounds, and every error as an answer."""

import asyncio
import logging
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from warmroute_common.api_errors import (
    ApiError,
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    TooSlowError,
)
from warmroute_common.http.wakes import Wakes

log = logging.getLogger("warmroute")


@dataclass(kw_only=True)
class Bodies:
    """What the bodies of an application's requests may take, and take now."""

    within_s: float
    """For each. A body that never ends would else be kept for ever."""
    limit_bytes: int
    """For all that are being read, or have been and are not released yet."""
    held_bytes: int = 0


BODIES: Final = web.AppKey("bodies", Bodies)
"""Every application whose handlers call `read_body` has this."""
_HELD_BYTES: Final = web.RequestKey("held_bytes", int)


@web.middleware
async def errors_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the shape that the path's clients parse."""
    try:
        return await handler(request)
    except ApiError as error:
        response = error_response(request.path, error)
        if leaves_body(error):
            response.force_close()
        return response
    except web.HTTPNotFound:
        message = f"the router has no endpoint {request.method} {request.path}"
        return error_response(request.path, NotFoundError(message))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        response = error_response(request.path, MethodNotAllowedError(message))
        response.headers["Allow"] = allowed
        return response
    except ConnectionResetError:
        raise  # the client has gone: no answer reaches it
    except Exception as error:  # noqa: BLE001
        return error_response(request.path, defect(f"{request.method} {request.path}", error))
    finally:
        release_body(request)


def defect(what: str, error: Exception) -> ApiError:
    """Log an error that no part has foreseen; return the one that the client gets.

    The log gets the trace, not the exception's text, which may quote a prompt.
    """
    trace = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed: %s\n%s", what, type(error).__name__, trace)
    return ApiError("the router failed; see its log")


def leaves_body(error: ApiError) -> bool:
    """Whether the rest of a body may still come, so that the connection has to be closed."""
    return isinstance(error, TooLargeError | TooSlowError | OverloadedError)


def is_anthropic(path: str) -> bool:
    """Whether a path's clients parse Anthropic's errors."""
    return path.startswith("/v1/messages")


def error_body(path: str, error: ApiError) -> bytes:
    """Return an error in the shape that the path's clients parse."""
    return orjson.dumps(error.anthropic_body() if is_anthropic(path) else error.openai_body())


def error_response(path: str, error: ApiError) -> web.Response:
    """Return an error as a whole response."""
    return web.Response(
        status=error.status,
        body=error_body(path, error),
        content_type="application/json",
        headers=error.headers,
    )


def as_json(value: object, status: int = 200) -> web.Response:
    """Return a value as a response."""
    body = orjson.dumps(value, default=str)
    return web.Response(status=status, body=body, content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """Return the body, which counts as held until `release_body`.

    Raises `TooLargeError` as soon as it is known to be over its app's limit, `TooSlowError` or `OverloadedError`.
    """
    announced, limit_bytes = request.content_length, request.client_max_size
    if announced is not None and announced > limit_bytes:
        raise _too_large(limit_bytes, f"{announced} bytes were announced")
    bodies, wakes = request.app[BODIES], Wakes(request)
    # Most bodies have come with their headers, and a timer costs more than all else here.
    is_here = request.content.is_eof()
    try:
        async with nullcontext() if is_here else asyncio.timeout(bodies.within_s):
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
    """Note that a request's body is no longer held. Idempotent; also where none was read."""
    if held_bytes := request.pop(_HELD_BYTES, 0):
        request.app[BODIES].held_bytes -= held_bytes


async def _read(request: web.Request, bodies: Bodies, limit_bytes: int, wakes: Wakes) -> bytes:
    chunks, size = [], 0
    # Not by request.read(): that keeps the body as long as the request.
    while chunk := await request.content.readany():
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes, "more was sent")
        if bodies.held_bytes + len(chunk) > bodies.limit_bytes:
            raise OverloadedError("the bodies of other requests take all memory that is for them")
        bodies.held_bytes += len(chunk)
        request[_HELD_BYTES] = size
        chunks.append(chunk)
        wakes.received(size)
    return b"".join(chunks)


def _too_large(limit_bytes: int, what: str) -> TooLargeError:
    return TooLargeError(
        f"the body may have {limit_bytes} bytes and {what} "
        "(max_body_bytes in the router's configuration)"
    )
