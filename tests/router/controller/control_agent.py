"""An agent whose tiers are sets of chunk numbers, for tests of the controller."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tests.router.agent_server import AgentServer
from warmroute_common import agent_protocol as wire

CHUNK_TOKENS = 64
TIERS: tuple[wire.TierName, ...] = ("cpu", "disk", "remote")

_T = TypeVar("_T", bound=msgspec.Struct)


class ControlAgent(AgentServer):
    """Answers what the controller asks; every prompt's chunks are numbers from 0."""

    def __init__(self, name: str, **info: Any) -> None:
        super().__init__(
            instance_id=name,
            incarnation=f"{name}-1",
            **{"layout": "L", "transfer_port": 7777, **info},
        )
        self.chunks: dict[str, set[int]] = {tier: set() for tier in TIERS}
        self.asked: list[tuple[str, msgspec.Struct]] = []
        self.moves: dict[str, wire.MoveStatus] = {}
        self.refusal: tuple[int, str] | None = None
        """What calls that change something are answered with, if set."""
        self.silent = False
        """Whether calls are not answered until the test ends."""
        self.arrived = asyncio.Semaphore(0)
        """Released by each call that comes while silent."""

    def hold(self, **chunks: Sequence[int]) -> None:
        """Put chunks into tiers."""
        for tier, numbers in chunks.items():
            self.chunks[tier] = set(numbers)

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/health", self._health)
        app.router.add_post("/lookup", self._lookup)
        app.router.add_post("/pin", self._pin)
        app.router.add_post("/unpin", self._pin)
        app.router.add_post("/clear", self._clear)
        app.router.add_post("/move", self._move)
        app.router.add_get("/moves/{event_id}", self._move_status)
        return app

    async def _heard(self, request: web.Request) -> None:
        self._refuse(request)
        if self.silent:
            self.arrived.release()
            await asyncio.Event().wait()

    async def _call(self, request: web.Request, kind: type[_T]) -> _T:
        await self._heard(request)
        call = msgspec.json.decode(await request.read(), type=kind)
        self.asked.append((request.path, call))
        if self.refusal is not None and request.path != "/lookup":
            raise _Refusal(*self.refusal)
        return call

    async def _health(self, request: web.Request) -> web.Response:
        await self._heard(request)
        return web.json_response({"status": "ok"})

    async def _lookup(self, request: web.Request) -> web.Response:
        call = await self._call(request, wire.LookupRequest)
        tiers: list[str] = []
        for chunk in range(len(call.tokens or []) // CHUNK_TOKENS):
            wanted = TIERS if call.tier is None else (call.tier,)
            found = next((tier for tier in wanted if chunk in self.chunks[tier]), None)
            if found is None:
                break
            tiers.append(found)
        by_tier = {tier: tiers.count(tier) * CHUNK_TOKENS for tier in tiers}
        reply = wire.LookupReply(
            matched_tokens=len(tiers) * CHUNK_TOKENS, tokens_by_tier=by_tier, tiers=tiers
        )
        return _json(reply)

    async def _pin(self, request: web.Request) -> web.Response:
        call = await self._call(request, wire.PinRequest)
        return _json(wire.PinReply(num_tokens=len(self.chunks[call.tier]) * CHUNK_TOKENS))

    async def _clear(self, request: web.Request) -> web.Response:
        call = await self._call(request, wire.ClearRequest)
        dropped: dict[str, int] = {}
        for tier in call.tiers or TIERS:
            dropped[tier] = len(self.chunks[tier])
            self.chunks[tier] = set()
        return _json(wire.ClearReply(dropped=dropped))

    async def _move(self, request: web.Request) -> web.Response:
        await self._call(request, wire.MoveRequest)
        event_id = f"agent's {len(self.moves)}/{self.info['incarnation']}"
        self.moves[event_id] = wire.MoveStatus(
            event_id=event_id, state="running", asked_chunks=3, arrived_chunks=1, moved_bytes=10
        )
        return _json(wire.MoveReply(event_id=event_id, num_tokens=3 * CHUNK_TOKENS))

    async def _move_status(self, request: web.Request) -> web.Response:
        await self._heard(request)
        status = self.moves.get(request.match_info["event_id"])
        if status is None:
            return web.json_response({"error": "no such move"}, status=404)
        return _json(status)

    def end_moves(self, state: Any, *, arrived: int = 3, error: str = "") -> None:
        """Have every move be over."""
        for event_id, status in self.moves.items():
            self.moves[event_id] = msgspec.structs.replace(
                status, state=state, arrived_chunks=arrived, moved_bytes=30, error=error
            )


class _Refusal(web.HTTPException):
    """An agent's own refusal."""

    def __init__(self, status: int, said: str) -> None:
        self.status_code = status
        super().__init__(text=msgspec.json.encode({"error": said}).decode())


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
