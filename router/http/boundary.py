"""A request's body, read within its limit, and every error as an answer."""

import asyncio
import logging
from typing import Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from router.config import ApiError, BadRequest, MethodNotAllowed, NotFound, TooLarge

log = logging.getLogger("warmroute")

BODY_S: Final = 60.0
"""So long may a call's body take, where few calls are answered at once: one that never ends must
not keep others out for ever."""


@web.middleware
async def errors_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the shape that the path's clients parse."""
    try:
        return await handler(request)
    except ApiError as error:
        response = error_response(request.path, error)
        if isinstance(error, TooLarge):
            response.force_close()
        return response
    except web.HTTPNotFound:
        message = f"the router has no endpoint {request.method} {request.path}"
        return error_response(request.path, NotFound(message))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        response = error_response(request.path, MethodNotAllowed(message))
        response.headers["Allow"] = allowed
        return response
    except ConnectionResetError:
        raise  # the client has gone: no answer reaches it
    except Exception:
        # The last resort for defects of ours: the client gets an answer in
        # its own shape, the log gets the trace.
        log.exception("%s %s failed", request.method, request.path)
        return error_response(request.path, ApiError("the router failed; see its log"))


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


async def read_body_soon(request: web.Request) -> bytes:
    """Return what `read_body` does; raise `BadRequest` where that takes more than `BODY_S`."""
    try:
        async with asyncio.timeout(BODY_S):
            return await read_body(request)
    except TimeoutError:
        raise BadRequest(f"the body did not come whole within {BODY_S:g} s") from None


async def read_body(request: web.Request) -> bytes:
    """Return the body; raise `TooLarge` as soon as it is known to be over its app's limit."""
    announced, limit_bytes = request.content_length, request.client_max_size
    if announced is not None and announced > limit_bytes:
        raise _too_large(limit_bytes, f"{announced} bytes were announced")
    chunks, size = [], 0
    try:
        # Not by request.read(): that keeps the body as long as the request.
        while chunk := await request.content.readany():
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes, "more was sent")
            chunks.append(chunk)
    except web.RequestPayloadError:
        raise BadRequest(
            "the body is not encoded as its Content-Encoding and Transfer-Encoding say"
        ) from None
    return b"".join(chunks)


def _too_large(limit_bytes: int, what: str) -> TooLarge:
    return TooLarge(
        f"the body may have {limit_bytes} bytes and {what} "
        "(max_body_bytes in the router's configuration)"
    )
