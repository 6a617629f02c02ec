"""Reading requests and writing answers, the same way for every path."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from cacheengine.engine import CacheEngine
from cacheengine.residency import Promotion
from warmroute_common import agent_protocol as wire
from warmroute_common.api_errors import ApiError, BadRequestError
from warmroute_common.http_server import Bodies, ErrorAnswers, read_body, release_body

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)

_MOST_S: Final = 3600.0
BODY_S: Final = 30.0
"""How long one body may take to arrive."""
MAX_BODY_BYTES: Final = 8 * 1024**2
"""For one request: more than 65,536 chunk keys, or a million tokens, take."""
MAX_BODIES_BYTES: Final = 64 * 1024**2
"""For all requests that are being read."""


class NoJsonError(ApiError):
    """The body is declared as something other than JSON (415): forms in web pages send such."""

    status = 415


class PeerError(ApiError):
    """Another replica could not be asked, or refused (502)."""

    status = 502


class AgentErrors(ErrorAnswers):
    """The agent's errors: ``{"error": text}``."""

    server = "agent"
    log = connection_log = logging.getLogger("vllm.warmroute")

    def body(self, path: str, error: ApiError) -> bytes:
        """Return an error's body."""
        return msgspec.json.encode({"error": f"{path}: {error.message}"})


def agent_bodies() -> Bodies:
    """Return the limits of the agent's request bodies."""
    return Bodies(
        within_s=BODY_S,
        limit_bytes=MAX_BODIES_BYTES,
        each_hint="the agent's limit for one body",
        all_hint=f"{MAX_BODIES_BYTES} bytes in all",
    )


async def decode(request: web.Request, kind: type[_T]) -> _T:
    """Return a request's body; raise `BadRequestError` if it is not of that kind."""
    if request.content_type != "application/json":
        raise NoJsonError("a request's body is JSON: send 'Content-Type: application/json'")
    try:
        return msgspec.json.decode(await read_body(request) or b"{}", type=kind)
    except wire.UNREADABLE as error:
        raise BadRequestError(f"the body is not a {kind.__name__}: {error}") from None
    finally:
        release_body(request)


def number(request: web.Request, name: str, kind: Callable[[str], _N]) -> _N:
    """Return a number of the query, 0 if it is missing; raise `BadRequestError` if it is malformed."""
    text = request.query.get(name, "0")
    try:
        value = kind(text)
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise BadRequestError(f"'{name}' is {text!r}, not a number") from None
    return value


def seconds(name: str, value: float, *, least: float = 0.0) -> float:
    """Return a number of seconds; raise `BadRequestError` if it is out of range."""
    if not least <= value <= _MOST_S:
        raise BadRequestError(f"'{name}' is {value}; give seconds from {least:g} to {_MOST_S:g}")
    return value


def as_json(value: msgspec.Struct) -> web.Response:
    """Answer with one of `wire`'s structures as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def as_msgpack(value: msgspec.Struct) -> web.Response:
    """Answer with one of `wire`'s structures as msgpack."""
    return web.Response(body=msgspec.msgpack.encode(value), content_type=wire.MSGPACK)


# TODO of cacheengine.agent.agent_requests: Waiting on the agent's loop for what engine threads do.

MAX_WAIT_S: Final = 30.0
"""Longest that a call may ask to wait."""


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set ``event`` from an engine thread."""
    # RuntimeError: the agent stopped, and so did the waiting call.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


async def wait_for_promotion(promotion: Promotion, wait_s: float) -> None:
    """Return when the promotion is done, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    promotion.add_done_callback(lambda: wake(loop, done))
    await wait_for_event(done, wait_s)


async def wait_for_news(engine: CacheEngine, after: int, wait_s: float) -> None:
    """Return when the engine has an event later than ``after``, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    # The listener is there before the check, so an event between the two
    # still wakes this call.
    forget = engine.add_event_listener(lambda: wake(loop, news))
    try:
        if engine.last_seq <= after and wait_s > 0:
            await wait_for_event(news, wait_s)
    finally:
        forget()


async def wait_for_event(event: asyncio.Event, wait_s: float) -> None:
    """Return when ``event`` is set, or after ``wait_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
