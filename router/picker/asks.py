"""What an Envoy with our own configuration asks, by HTTP, and what its log tells of the answers."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.envoy import DESTINATION, EXCHANGE, HINT, MAX_RETRIES, REPLICAS, STATUS, SUBSET
from router.picker.answers import Told
from router.picker.endpoints import Endpoints
from router.picker.exchange import Exchange, Picked
from router.picker.words import listed
from router.proxy import RequestLifecycle
from warmroute_common.http_server import BODIES, Bodies, errors_answered, read_body

_SILENT_S: Final = 5.0
"""Envoy's log tells of each request every second. One of which it tells nothing for so long is
over: Envoy has ended, or never got the answer."""
_CHECK_S: Final = 0.5
_SERVER_ERROR: Final = 500
"""From here on Envoy takes a status for the picker's own failure, and lets the request through."""
_REFUSED: Final = 403


class Asks:
    """Says where requests go, and keeps them until the log has told their end."""

    def __init__(self, judge: RequestLifecycle, endpoints: Endpoints) -> None:
        self._judge = judge
        self._endpoints = endpoints
        # Of this run: Envoy may tell of requests that a picker before this one placed.
        self._run = uuid.uuid4().hex[:8]
        self._numbers = count()
        self._exchanges: dict[str, Exchange] = {}
        """Requests that have been picked for, by the names that the log tells."""
        self._is_empty = asyncio.Event()

    def app(self) -> web.Application:
        """Return what answers Envoy; to be run with ``handler_cancellation=True``."""
        config = self._judge.config
        app = web.Application(
            middlewares=[_refusals, errors_answered], client_max_size=config.max_body_bytes
        )
        app[BODIES] = Bodies(within_s=config.timeouts.body_s, limit_bytes=config.max_bodies_bytes)
        app.router.add_route("*", "/{path:.*}", self._pick)
        return app

    async def note(self, told: Told) -> None:
        """Take over what the log tells; nothing of requests that are closed, or another's."""
        exchange = self._exchanges.get(told.exchange)
        if exchange is None:
            return
        await exchange.told(told)
        if exchange.is_told:
            self._close(told.exchange)

    async def keep_closing(self) -> None:
        """Close the requests of which nothing more is told, until this is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            before_s = time.monotonic() - _SILENT_S
            for name, each in list(self._exchanges.items()):
                if each.told_s < before_s:
                    self._close(name)

    async def drained(self, within_s: float) -> None:
        """Wait until the log has told the end of each, for so long at most."""
        self._is_empty.clear()
        if self._exchanges:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), within_s)

    def close(self) -> None:
        """Wait for no more of what is told."""
        for name in list(self._exchanges):
            self._close(name)

    def _close(self, name: str) -> None:
        if (exchange := self._exchanges.pop(name, None)) is not None:
            exchange.close()
        if not self._exchanges:
            self._is_empty.set()

    async def _pick(self, request: web.Request) -> web.Response:
        headers = request.headers
        exchange = Exchange(
            self._judge,
            self._endpoints,
            request.method,
            request.raw_path,
            headers,
            named=_named(headers),
            sees_tokens=False,
        )
        try:
            with self._judge.noting_end(exchange.record):
                picked = await exchange.pick(await read_body(request))
        except BaseException:
            exchange.close()
            raise
        name = f"{self._run}-{next(self._numbers)}"
        self._exchanges[name] = exchange
        return web.Response(headers=_answer(name, picked, exchange.answer_headers()))


def _answer(name: str, picked: Picked, told: Mapping[str, str]) -> dict[str, str]:
    answer = {
        DESTINATION: ",".join(picked.endpoints),
        MAX_RETRIES: str(len(picked.endpoints) - 1),
        EXCHANGE: name,
        REPLICAS: "\t".join(map(_one_line, picked.replicas)),
    }
    if picked.api_key is not None:
        answer["Authorization"] = f"Bearer {picked.api_key}"
    for key, value in told.items():
        answer[key] = _one_line(value)
    return answer


def _one_line(value: str) -> str:
    return value if value.isprintable() else " ".join(value.split())


def _named(headers: Mapping[str, str]) -> Sequence[str] | None:
    """Return the endpoints to choose from, None where none is named; metadata go first."""
    hint = headers.get(HINT)
    if not hint or hint == "-":
        subset = headers.get(SUBSET)
        return None if subset is None else listed(subset)
    try:
        value = json.loads(hint)
    except ValueError:
        return listed(hint)
    named: Iterable[object] = value if isinstance(value, list) else ()
    return [each.strip() for each in named if isinstance(each, str)]


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have Envoy pass on refusals, whatever their status: of one from 500 on it would not."""
    answer = await handler(request)
    if answer.status >= _SERVER_ERROR:
        answer.headers[STATUS] = str(answer.status)
        answer.set_status(_REFUSED)
    return answer
