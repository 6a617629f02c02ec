"""Reading requests and writing answers, the same way for every path."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from warmroute_common import agent_protocol as wire

logger = logging.getLogger("vllm.warmroute")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")
_N = TypeVar("_N", int, float)

_MOST_S: Final = 3600.0
BODY_S: Final = 30.0
"""A body that never ends would else be waited for as long as its caller lives."""
MAX_BODY_BYTES: Final = 8 * 1024**2
"""Of one request: more than the keys of 65,536 chunks, or a million tokens, take."""
MAX_BODIES_BYTES: Final = 64 * 1024**2
"""Of all requests that are being read."""


class BadCallError(Exception):
    """A request the agent cannot serve as it stands; the text says how to mend it."""

    status = 400


class AgentUnauthorizedError(BadCallError):
    """A request that does not show the fleet's secret."""

    status = 401


class ForeignError(BadCallError):
    """A request that a web page may have made."""

    status = 403


class NoJsonError(BadCallError):
    """A request whose body is said to be something else: forms in web pages send such."""

    status = 415


class TooSlowError(BadCallError):
    """A request whose body did not come in time."""

    status = 408


class NotKnownError(BadCallError):
    """A request about something that is not there (any more)."""

    status = 404


class TooMuchError(BadCallError):
    """A request that may be served later."""

    status = 503


class PeerError(BadCallError):
    """A request that needs another replica, which could not be asked or refused."""

    status = 502


class Bodies:
    """Room for the bodies that are being read, all together."""

    def __init__(self) -> None:
        self._left_bytes = MAX_BODIES_BYTES

    @contextlib.contextmanager
    def room_for(self, request: web.Request) -> Iterator[None]:
        """Keep room for a request's body; raise `TooMuchError` where there is none left."""
        said = request.content_length
        size = MAX_BODY_BYTES if said is None else min(said, MAX_BODY_BYTES)
        if size > self._left_bytes:
            raise TooMuchError(f"{MAX_BODIES_BYTES} bytes of bodies are being read; try again")
        self._left_bytes -= size
        try:
            yield
        finally:
            self._left_bytes += size


BODIES: Final = web.AppKey("bodies", Bodies)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refusal as ``{"error": text}``."""
    try:
        return await handler(request)
    except BadCallError as error:
        response = web.json_response({"error": f"{request.path}: {error}"}, status=error.status)
        if isinstance(error, TooSlowError):
            response.force_close()  # the rest of the body may still come
        return response
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
    except ConnectionResetError:
        raise  # the caller has gone: no answer reaches it
    except Exception:
        logger.exception("the agent failed at %s", request.path)
        return web.json_response({"error": "the agent failed; see its log"}, status=500)


async def decode(request: web.Request, kind: type[_T]) -> _T:
    """Return a request's body; raise `BadCallError` if it is not of that kind."""
    if request.content_type != "application/json":
        raise NoJsonError("a request's body is JSON: send 'Content-Type: application/json'")
    try:
        with request.app[BODIES].room_for(request):
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        return msgspec.json.decode(body or b"{}", type=kind)
    except TimeoutError:
        raise TooSlowError(f"the body did not come whole within {BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise BadCallError("the body is not encoded as its headers say") from None
    except wire.UNREADABLE as error:
        raise BadCallError(f"the body is not a {kind.__name__}: {error}") from None


def number(request: web.Request, name: str, kind: Callable[[str], _N]) -> _N:
    """Return a number of the query, 0 if it is not there; raise `BadCallError` if it is none."""
    text = request.query.get(name, "0")
    try:
        value = kind(text)
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise BadCallError(f"'{name}' is {text!r}, not a number") from None
    return value


def seconds(name: str, value: float, *, least: float = 0.0) -> float:
    """Return a number of seconds; raise `BadCallError` if it is out of range."""
    if not least <= value <= _MOST_S:
        raise BadCallError(f"'{name}' is {value}; give seconds from {least:g} to {_MOST_S:g}")
    return value


def as_json(value: msgspec.Struct) -> web.Response:
    """Answer with one of `wire`'s structures as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def as_msgpack(value: msgspec.Struct) -> web.Response:
    """Answer with one of `wire`'s structures as msgpack."""
    return web.Response(body=msgspec.msgpack.encode(value), content_type=wire.MSGPACK)
