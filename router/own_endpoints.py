"""The endpoints that the router answers itself: models, health, metrics, explain."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from router.config import BadRequest, NoReplica, RouterConfig, UnknownModel
from router.explanation import explanation
from router.feeds import fetch_models
from router.fleet import Fleet, Replica, State
from router.http import read_body
from router.proxy import PROMPTED, Proxy, json_object, parse
from router.record import CONTENT_TYPE, Metrics


class Api:
    """Handlers that need no replica's answer to a prompt."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        fleet: Fleet,
        proxy: Proxy,
        metrics: Metrics,
        session: aiohttp.ClientSession,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._proxy = proxy
        self._metrics = metrics
        self._session = session

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: what the replicas that are up serve, each model once."""
        return _json({"object": "list", "data": await self._merged_models(request)})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``."""
        name = request.match_info["model"]
        for each in await self._merged_models(request):
            if each["id"] == name:
                return _json(each)
        raise UnknownModel(f"no replica serves the model '{name}'", param="model")

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``: 200 while at least one replica is up, else 503.

        ``first_probes`` are under way until every replica has been found up or down.
        """
        replicas = self._fleet.replicas.values()
        is_ok = any(each.state is State.UP for each in replicas)
        is_probed = all(each.state is not State.UNKNOWN for each in replicas)
        body = {
            "status": "ok" if is_ok else "no replica is up",
            "first_probes": "done" if is_probed else "under way",
            "replicas": {
                each.id: {"url": each.config.url, "state": str(each.state)} for each in replicas
            },
        }
        return _json(body, status=200 if is_ok else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics``, for Prometheus."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def explain(self, request: web.Request) -> web.Response:
        """``POST /explain``: where a request would go, and why, without sending it.

        The body is that of the request; ``?endpoint=`` says which, by default
        the chat endpoint for ``messages``, else the one for ``prompt`` or ``input``.
        """
        body = await read_body(request)
        endpoint = _endpoint(request.query.get("endpoint"), json_object(body))
        asked = parse(endpoint, body, request.headers, self._config.sessions.header)
        prompt, decision = await self._proxy.decide(asked)
        return _json(explanation(prompt, decision, self._fleet, model=asked.model))

    async def _merged_models(self, request: web.Request) -> list[dict[str, object]]:
        up = [each for each in self._fleet.replicas.values() if each.state is State.UP]
        answers = await asyncio.gather(*(self._models_of(each, request.headers) for each in up))
        if not any(answer is not None for answer in answers):
            raise NoReplica("no replica tells which models it serves")
        merged: dict[object, dict[str, object]] = {}
        for answer in answers:
            for each in answer or []:
                merged.setdefault(each["id"], each)
        return list(merged.values())

    async def _models_of(
        self, replica: Replica, headers: Mapping[str, str]
    ) -> list[dict[str, object]] | None:
        own = replica.config.api_key
        authorization = headers.get("Authorization") if own is None else f"Bearer {own}"
        return await fetch_models(
            self._session,
            replica.config,
            headers={} if authorization is None else {"Authorization": authorization},
            timeout_s=self._config.timeouts.health_timeout_s,
        )


def _endpoint(named: str | None, fields: Mapping[str, Any]) -> str:
    if named is not None:
        if named not in PROMPTED:
            known = ", ".join(sorted(PROMPTED))
            raise BadRequest(f"'{named}' has no prompt to explain; choose from {known}")
        return named
    for name, endpoint in (
        ("messages", "/v1/chat/completions"),
        ("prompt", "/v1/completions"),
        ("input", "/v1/responses"),
    ):
        if name in fields:
            return endpoint
    raise BadRequest("the body has neither 'messages' nor 'prompt' nor 'input'")


def _json(value: object, *, status: int = 200) -> web.Response:
    body = orjson.dumps(value, default=str)
    return web.Response(status=status, body=body, content_type="application/json")
