"""``/replicas``: how each replica is, and taking one out of service without losing a request."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from warmroute_common.api_errors import BadRequestError, ForbiddenError, NotFoundError
from warmroute_common.http_server import as_json

log = logging.getLogger("warmroute.replicas")

_MOST_WAIT_S: Final = 3600.0
_LOOK_EVERY_S: Final = 0.05
_NAMED: Final = 20
"""Ids in a message."""


@dataclass(frozen=True, kw_only=True)
class ReplicaEndpoints:
    """Handlers for the administration, which `access` guards."""

    fleet: Fleet
    look_again: Callable[[Replica], None]
    """Has a replica's health asked for at once."""

    async def listing(self, _: web.Request) -> web.Response:
        """``GET /replicas``: all of them, in the order of the configuration."""
        now_s = time.monotonic()
        return as_json([_told(each, now_s) for each in self.fleet.replicas.values()])

    async def drain(self, request: web.Request) -> web.Response:
        """``POST /replicas/ID/drain``: give it nothing new; its requests in flight end normally.

        With ``?wait_s=`` it answers when nothing of this router's runs there any more, or after
        so many seconds. Idempotent.
        """
        _refuse_other_origins(request)
        wait_s, replica = _wait_s(request), self._named(request)
        if replica.state is not ReplicaState.DRAINING:
            log.info("%s drains, as the administration asked", replica.id)
        self.fleet.drain(replica.id)
        until_s = time.monotonic() + wait_s
        while _is_busy(replica) and time.monotonic() < until_s:  # noqa: ASYNC110  (a count)
            await asyncio.sleep(_LOOK_EVERY_S)
        return as_json(_told(replica, time.monotonic()))

    async def resume(self, request: web.Request) -> web.Response:
        """``POST /replicas/ID/resume``: end `drain`; it gets requests once it is found up."""
        _refuse_other_origins(request)
        replica = self._named(request)
        if replica.state is ReplicaState.DRAINING:
            log.info("%s is resumed, as the administration asked", replica.id)
            self.fleet.resume(replica.id)
            self.look_again(replica)
        return as_json(_told(replica, time.monotonic()))

    def _named(self, request: web.Request) -> Replica:
        name, replicas = request.match_info["id"], self.fleet.replicas
        replica = replicas.find(name)
        if replica is None or replica.is_removed:
            ids = list(replicas)
            more = ", ..." if len(ids) > _NAMED else ""
            known = ", ".join(ids[:_NAMED]) or "none"
            raise NotFoundError(f"there is no replica '{name}'; known: {known}{more}")
        return replica


def _is_busy(replica: Replica) -> bool:
    return replica.in_flight > 0 and replica.state is ReplicaState.DRAINING


def _wait_s(request: web.Request) -> float:
    said = request.query.get("wait_s", "0")
    try:
        wait_s = float(said)
    except ValueError:
        wait_s = nan
    if not 0 <= wait_s <= _MOST_WAIT_S:
        raise BadRequestError(
            f"wait_s must be a number of seconds from 0 to {_MOST_WAIT_S:g}", param="wait_s"
        )
    return wait_s


def _refuse_other_origins(request: web.Request) -> None:
    """Raise `ForbiddenError` for a web page of another origin in an administrator's browser."""
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise ForbiddenError("pages of other origins may not change replicas")


def _told(replica: Replica, now_s: float) -> dict[str, Any]:
    return {
        "id": replica.id,
        "url": replica.config.public_url,
        "state": str(replica.state),
        "breaker": str(replica.breaker.state),
        "in_flight": replica.in_flight,
        "why": replica.why_idle(now_s),
    }
