"""A server that speaks the Kubernetes API's list and watch of EndpointSlices."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aiohttp import web

GONE = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "old"}


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    """Return one of a slice's; ready unless told otherwise."""
    told: dict[str, Any] = {"addresses": [address], "conditions": {"ready": True} | conditions}
    if pod:
        target = {"kind": "Pod", "namespace": "here", "name": pod, "uid": f"uid-{pod}"}
        told["targetRef"] = target
    return told


def slice_of(
    name: str,
    *endpoints: dict[str, Any],
    port: int = 8000,
    family: str = "IPv4",
    ports: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a slice whose one port is ``port``, or whose ``ports`` have names."""
    named = [{"name": each, "port": number} for each, number in ports.items()]
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": named or [{"name": "", "port": port, "protocol": "TCP"}],
    }


@dataclass
class Api:
    """The slices of one service, and every change of theirs since a version."""

    url: str = ""
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    oldest: int = 100
    """A watch from before this version is told that it is gone."""
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    refused_with: int = 200
    gone_by_status: bool = False
    """Whether a version that is gone is answered with 410, or by an event."""
    asked: list[dict[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    watches: int = 0
    cuts: int = 0

    @property
    def lists(self) -> int:
        return sum("watch" not in each for each in self.asked)

    async def put(self, told: dict[str, Any]) -> None:
        name = told["metadata"]["name"]
        await self._note("MODIFIED" if name in self.slices else "ADDED", told)
        self.slices[name] = told

    async def delete(self, name: str) -> None:
        await self._note("DELETED", self.slices.pop(name))

    async def forget_history(self) -> None:
        """As a real one does of what is older than some minutes."""
        self.events, self.oldest = [], self.version + 1
        self.version += 1

    async def cut(self) -> None:
        """Break off every watch."""
        async with self.changed:
            self.cuts += 1
            self.changed.notify_all()

    async def bookmark(self) -> None:
        self.version += 1
        await self._send({"type": "BOOKMARK", "object": {"metadata": self._meta()}})

    async def _note(self, kind: str, told: dict[str, Any]) -> None:
        self.version += 1
        told["metadata"] |= self._meta()
        await self._send({"type": kind, "object": told})

    async def _send(self, event: dict[str, Any]) -> None:
        async with self.changed:
            self.events.append((self.version, json.loads(json.dumps(event))))
            self.changed.notify_all()

    def _meta(self) -> dict[str, str]:
        return {"resourceVersion": str(self.version)}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization"))
        if self.refused_with != 200:
            return web.json_response({"message": "no"}, status=self.refused_with)
        if request.match_info["namespace"] != "here":
            return web.json_response({"message": "forbidden"}, status=403)
        if "watch" in request.query:
            return await self._watch(request, int(request.query["resourceVersion"]))
        body = {
            "kind": "EndpointSliceList",
            "metadata": self._meta(),
            "items": list(self.slices.values()),
        }
        return web.json_response(body)

    async def _news(self, version: int, cuts: int) -> None:
        def come() -> bool:
            return cuts != self.cuts or (bool(self.events) and self.events[-1][0] > version)

        async with self.changed:
            await self.changed.wait_for(come)

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        if version < self.oldest and self.gone_by_status:
            return web.json_response(GONE, status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if version < self.oldest:
            await _write(response, {"type": "ERROR", "object": GONE})
            return response
        self.watches += 1
        cuts = self.cuts
        while cuts == self.cuts:
            for at, event in list(self.events):
                if at > version:
                    version = at
                    await _write(response, event)
            await self._news(version, cuts)
        assert request.transport is not None
        request.transport.abort()
        return response


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


@asynccontextmanager
async def kubernetes_api() -> AsyncIterator[Api]:
    """Run it on a free port."""
    api = Api()
    app = web.Application()
    app.router.add_get(
        "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", api.answer
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
