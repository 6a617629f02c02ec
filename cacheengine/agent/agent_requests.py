"""Helpers of the agent's handlers: reading requests, errors, answers, waiting for the engine.

Engine threads do the work that a call waits for; `wake` passes their signals to the agent's event
loop.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from cacheengine.engine.engine import CacheEngine
from cacheengine.residency.decisions import Promotion
from warmroute_common import agent_protocol as wire
from warmroute_common.api_errors import ApiError, BadRequestError
from warmroute_common.decoding import decode_json
from warmroute_common.http_server import Bodies, ErrorAnswers, read_body, release_body

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)

_MAX_SECONDS: Final = 3600.0
MAX_WAIT_S: Final = 30.0
"""Longest wait that a call may request."""
BODY_S: Final = 30.0
"""How long one body may take to arrive."""
MAX_BODY_BYTES: Final = 8 * 1024**2
"""Limit of one request's body; enough for 65,536 chunk keys or a million tokens."""
MAX_BODIES_BYTES: Final = 64 * 1024**2
"""Limit of all bodies that are being received."""


class NoJsonError(ApiError):
    """The request's content type is not JSON (415); web pages' forms cannot send JSON."""

    status = 415


class PeerError(ApiError):
    """Another replica could not be reached, or refused (502)."""

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
    """Return a request's body; raise `BadRequestError` if it does not have that structure."""
    if request.content_type != "application/json":
        raise NoJsonError("the body must be JSON: send 'Content-Type: application/json'")
    try:
        return decode_json(await read_body(request) or b"{}", kind)
    except wire.UNREADABLE as error:
        raise BadRequestError(f"the body is not a {kind.__name__}: {error}") from None
    finally:
        release_body(request)


def number(request: web.Request, name: str, kind: Callable[[str], _N]) -> _N:
    """Return a number of the query, 0 if missing; raise `BadRequestError` if it is malformed."""
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
    if not least <= value <= _MAX_SECONDS:
        raise BadRequestError(
            f"'{name}' is {value}; give seconds from {least:g} to {_MAX_SECONDS:g}"
        )
    return value


def as_json(value: msgspec.Struct) -> web.Response:
    """Return a response with one of `agent_protocol`'s structures as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def as_msgpack(value: msgspec.Struct) -> web.Response:
    """Return a response with one of `agent_protocol`'s structures as msgpack."""
    return web.Response(body=msgspec.msgpack.encode(value), content_type=wire.MSGPACK)


# --- waiting for engine threads ---


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set ``event`` on the agent's loop from an engine thread."""
    # RuntimeError: the agent has stopped, and so has the waiting call.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


async def wait_for_promotion(promotion: Promotion, wait_s: float) -> None:
    """Return when the promotion is done, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    promotion.add_done_callback(lambda: wake(loop, done))
    await wait_for_event(done, wait_s)


async def wait_for_engine_event(engine: CacheEngine, after: int, wait_s: float) -> None:
    """Return when the engine has an event later than number ``after``, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    # The listener is added before the check, so an event between the two still wakes this call.
    remove_listener = engine.add_event_listener(lambda: wake(loop, changed))
    try:
        if engine.last_seq <= after and wait_s > 0:
            await wait_for_event(changed, wait_s)
    finally:
        remove_listener()


async def wait_for_event(event: asyncio.Event, wait_s: float) -> None:
    """Return when ``event`` is set, or after ``wait_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
