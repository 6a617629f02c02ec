"""The endpoints that the router answers itself: models, health, metrics, usage, explain."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp import web

from router.api.access import GRANT, Access
from router.api.explanation import explanation
from router.config.settings import RouterConfig
from router.faults import FaultReport
from router.feeds.health_monitor import HealthMonitor
from router.feeds.replica_answers import fetch_models
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from router.fleet.scaling import PoolLoad, Scaling
from router.membership.reload import Reload
from router.policy import PROMPTED, Plane
from router.proxy.lifecycle import RequestLifecycle
from router.record.metrics import CONTENT_TYPE, Metrics
from router.record.usage_totals import UsageTotals
from router.waste.waste import Waste
from warmroute_common.api_errors import (
    BadRequestError,
    NoReplicaError,
    NotFoundError,
    UnknownModelError,
)
from warmroute_common.http_server import BODIES, LEAVING, as_json, read_body

_ASKED_AS_CLIENT: Final = 8
"""Replicas that one client's question for models becomes questions to."""


@dataclass(frozen=True, kw_only=True)
class OwnEndpoints:
    """Handlers that need no replica's answer to a prompt."""

    config: RouterConfig
    fleet: Fleet
    health_checks: HealthMonitor
    lifecycle: RequestLifecycle
    counted: Metrics
    usage_totals: UsageTotals
    session: aiohttp.ClientSession
    access: Access
    reload: Reload
    faults: FaultReport
    loads: Scaling
    wasted: Waste | None
    """None: nobody finds out why tokens were computed."""

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: what the replicas that are up serve, each model once, and aliases.

        Of several entries of a model the one with the longest context counts.

        It is what health checks have found: no replica is asked.
        """
        return as_json({"object": "list", "data": await self._merged_models(request)})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``."""
        name = request.match_info["model"]
        await self.lifecycle.look_for(self.fleet.aliases.get(name, name))
        merged = {str(each["id"]): each for each in await self._merged_models(request)}
        if name not in merged:
            raise UnknownModelError(name, merged)
        return as_json(merged[name])

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``: 200 while at least one replica is up, else 503; so while it leaves.

        Without a replica it is 200 too if requests wait for one: a router that nobody asks would
        not tell an autoscaler that it needs one.

        ``first_probes`` are under way until every replica has been found up or down. Each replica
        by its name and address only for the administration, whether the configuration's file as it
        is now is used, for each model whether its tokens are exact, and the faults by which the
        router does not know what replicas hold.
        """
        replicas = self.fleet.replicas.values()
        is_leaving = request.app[LEAVING].has_begun
        is_up = any(each.state is ReplicaState.UP for each in replicas)
        waits = self.config.admission.no_replica_wait_s > 0
        is_ok = (is_up or waits) and not is_leaving
        is_probed = all(each.state is not ReplicaState.UNKNOWN for each in replicas)
        body: dict[str, Any] = {
            "status": "draining" if is_leaving else "ok" if is_up else "no replica is up",
            "first_probes": "done" if is_probed else "under way",
            "states": Counter(str(each.state) for each in replicas),
        }
        if self.access.may_administer(request):
            body["replicas"] = {
                each.id: {"url": each.config.public_url, "state": str(each.state)}
                for each in replicas
            }
            body["configuration"] = {
                "problem": self.reload.problem,
                "used_at_next_start": self.reload.waiting,
            }
            body["tokens"] = self.faults.tokens()
            body["faults"] = self.faults.found()
        return as_json(body, status=200 if is_ok else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics``, for Prometheus."""
        return web.Response(
            body=await self.counted.render(), headers={"Content-Type": CONTENT_TYPE}
        )

    async def scaling(self, _: web.Request) -> web.Response:
        """``GET /scaling``: each model's load, and what one replica more or less would change.

        Times are in seconds; null where they would have no end.
        """
        loads = self.loads.loads(time.monotonic())
        models = [_scaling(each) | {"machine": self.loads.machine(each.model)} for each in loads]
        return as_json({"models": models})

    async def waste(self, request: web.Request) -> web.Response:
        """``GET /waste``: which tokens need not have been computed, why, and what that costs."""
        if self.wasted is None:
            raise NotFoundError("nothing is counted: the configuration has uncached_causes: false")
        return as_json(self.wasted.report(time.monotonic()))

    async def usage(self, request: web.Request) -> web.Response:
        """``GET /usage``: what keys have used of models, and what is left of their limits.

        A client sees its own key only.
        """
        grant = request.get(GRANT)
        shown = self.usage_totals.shown(None if grant is None else grant.name)
        return as_json(shown | {"limits": self.access.limits(grant)})

    async def explain(self, request: web.Request) -> web.Response:
        """``POST /explain``: where a request would go, and why, without sending it.

        The body is that of the request; ``?endpoint=`` says which, by default
        the chat endpoint for ``messages``, else the one for ``prompt`` or ``input``.
        """
        body = await read_body(request)
        named = request.query.get("endpoint")
        parse = partial(self.lifecycle.parse, Plane.PROXY, "POST")
        # All of them read the same fields.
        asked = await parse(named or "/v1/chat/completions", request.headers, body)
        endpoint = _endpoint(named, asked.fields)
        if endpoint != asked.endpoint:
            asked = await parse(endpoint, request.headers, body)
        with request.app[BODIES].holding(asked.parsed_bytes):
            prompt, decision = await self.lifecycle.decide(asked)
        return as_json(explanation(prompt, decision, self.fleet, model=asked.model))

    async def _merged_models(self, request: web.Request) -> list[Mapping[str, object]]:
        grant = request.get(GRANT)
        up = [each for each in self.fleet.replicas.values() if each.state is ReplicaState.UP]
        answers = [told for each in up if (told := self.health_checks.listed(each))]
        if not answers and grant is None and (client := request.headers.get("Authorization")):
            # The replicas check clients' keys themselves, and told the router's probes nothing.
            answers = await self._ask_as(client, up[:_ASKED_AS_CLIENT])
        if not answers:
            raise NoReplicaError("no replica tells which models it serves")
        merged: dict[object, Mapping[str, object]] = {}
        for answer in answers:
            for each in answer:
                if grant is None or grant.allows(str(each["id"])):
                    known = merged.setdefault(each["id"], each)
                    if _context(each) > _context(known):  # such prompts go where they fit
                        merged[each["id"]] = each
        for alias, real in self.fleet.aliases.items():
            if real in merged:
                merged[alias] = {**merged[real], "id": alias}
        return list(merged.values())

    async def _ask_as(
        self, client: str, replicas: Sequence[Replica]
    ) -> list[Sequence[Mapping[str, object]]]:
        timeout_s = self.config.timeouts.health_timeout_s
        headers = {"Authorization": client}
        asked = (
            fetch_models(self.session, each.config, headers=headers, timeout_s=timeout_s)
            for each in replicas
            if each.config.api_key is None
        )
        return [each for each in await asyncio.gather(*asked) if each]


def _scaling(load: PoolLoad) -> dict[str, Any]:
    return {
        "model": load.model,
        "replicas": load.replicas,
        "held": load.held,
        "without_replica": load.without_replica,
        "predicted_wait_s": load.predicted_wait_s,
        "binds": load.binds,
        "demand_replicas": {str(each): demand for each, demand in load.demand.items()},
        "sizes": [asdict(each) for each in load.sizes],
    }


def _context(model: Mapping[str, object]) -> int:
    length = model.get("max_model_len")
    return length if isinstance(length, int) else 0


def _endpoint(named: str | None, fields: Mapping[str, Any]) -> str:
    if named is not None:
        if named not in PROMPTED:
            known = ", ".join(sorted(PROMPTED))
            raise BadRequestError(f"'{named}' has no prompt to explain; choose from {known}")
        return named
    for name, endpoint in (
        ("messages", "/v1/chat/completions"),
        ("prompt", "/v1/completions"),
        ("input", "/v1/responses"),
    ):
        if name in fields:
            return endpoint
    raise BadRequestError("the body has neither 'messages' nor 'prompt' nor 'input'")
