"""Helpers: LMCache's servers, workers and events; agents and a controller over real HTTP."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from blockbuster import blockbuster_ctx

from router.api.access import Access
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.index.lmcache_keys import lmcache_chain
from router.lmcache.controller import Controller
from router.lmcache.coordinator import Coordinator, LiveServer
from router.lmcache.coordinator_protocol import (
    ObjectKey,
    ServerEventBatch,
    ServerRegistration,
    kv_rank,
)
from router.lmcache.instance_registry import ConfiguredInstance
from router.proxy.upstream import client_session
from tests.router.agent_server import AgentServer, serving
from warmroute_common import agent_protocol as wire
from warmroute_common.fleet_secret import FleetSecret

TRANSCRIPT = Path(__file__).with_name("transcript.jsonl")
"""lmcache 0.5.6 with L1 and a disk: a prompt stored and used, L1 cleared, then prefetched.

Each batch is cut to the entries of the prompt's first two chunks.
"""
MODEL = "models/small"
CHUNK = 256


def transcript_tokens() -> list[int]:
    """Return the transcript's prompt."""
    random = Random(1)
    return [random.randrange(10, 4000) for _ in range(2000)]


def transcript() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TRANSCRIPT.read_text().splitlines()]


def transcript_batches() -> list[ServerEventBatch]:
    """Return the transcript's batches, in their order."""
    return [
        msgspec.convert(batch, ServerEventBatch)
        for each in transcript()
        if each["path"] == "/events"
        for batch in each["body"]["batches"]
    ]


def key(number: int, *, model: str = MODEL, rank: int = 0, world: int = 1, salt: str = "") -> Any:
    """Return the key of one of the chunks of ``range(...)``, the prompt of most tests."""
    digest = chain(number + 1)[number]
    return ObjectKey(digest, model, kv_rank(world, rank), 0, salt)


def chain(chunks: int) -> list[bytes]:
    return lmcache_chain(range(chunks * CHUNK), CHUNK)


def batch(
    seq: int,
    event_type: str = "store",
    tier: str = "l1",
    keys: Sequence[ObjectKey] = (),
    **changes: Any,
) -> ServerEventBatch:
    """Return a batch of the server ``mp0``."""
    values: dict[str, Any] = {
        "instance_id": "mp0",
        "incarnation": 100,
        "seq": seq,
        "event_type": event_type,
        "tier": tier,
        "backend": {"l1": "dram", "l2": "fs_native"}[tier],
        "entries": [
            {"key": each.encoded(), "size_bytes": 1000 if event_type == "store" else 0}
            for each in keys
        ],
    }
    return msgspec.convert(values | changes, ServerEventBatch)


def make_fleet(count: int = 2, **changes: Any) -> Fleet:
    """Return a fleet of replicas r0, r1, ... that are up, each with an LMCache by its URL."""
    replicas = tuple(
        ReplicaConfig(
            url=f"http://host{number}:8000",
            instance_id=f"r{number}",
            **({"lmcache": f"http://host{number}:8210"} | changes),
        )
        for number in range(count)
    )
    fleet = Fleet(RouterConfig(replicas=replicas))
    for name in fleet.replicas:
        fleet.up(name)
    return fleet


def register(
    coordinator: Coordinator, name: str = "mp0", ip: str = "host0", port: int = 8210
) -> None:
    call = ServerRegistration(ip=ip, http_port=port, instance_id=name)
    coordinator.register(call, now_s=0.0, wall_s=0.0)


def coordinator_of(fleet: Fleet | None = None, **names: str) -> Coordinator:
    """Return a coordinator whose servers are registered and assigned: replica=server, ..."""
    coordinator = Coordinator(fleet or make_fleet())
    for replica, server in (names or {"r0": "mp0"}).items():
        register(coordinator, server)
        coordinator.replica_servers.assign(
            replica, LiveServer(url="http://host0:8210", instance_id=server, chunk_tokens=CHUNK)
        )
    return coordinator


@dataclass
class FakeServer:
    """A server of lmcache 0.5.6, as far as the router asks it."""

    instance_id: str = "mp0"
    hash_algorithm: str = "blake3"
    found: int | None = None
    """Chunks that a prefetch finds; None: all."""
    refusal: int | None = None
    """Error status of a prefetch."""
    gate: asyncio.Event | None = None
    """A prefetch is pending until this is set."""
    registered: bool = True
    """Whether its vLLM has registered its model."""
    busy: asyncio.Event | None = None
    """Health checks are not answered until this is set."""
    metrics: str | None = None
    """Answer to ``GET /metrics``; None: 404."""
    ranks: int = 1
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    polled: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/config", self.config)
        app.router.add_get("/status", self.status)
        app.router.add_get("/healthcheck", self.health)
        app.router.add_get("/metrics", self.tell_metrics)
        app.router.add_post("/cache/prefetches", self.prefetch)
        app.router.add_get("/cache/prefetches/{id}", self.poll)
        return app

    async def config(self, request: web.Request) -> web.Response:
        return web.json_response({"mp": {"instance_id": self.instance_id, "chunk_size": CHUNK}})

    async def status(self, request: web.Request) -> web.Response:
        contexts: dict[str, Any] = {}
        if self.registered:
            contexts["1"] = {"model_name": MODEL, "world_size": self.ranks}
        return web.json_response(
            {
                "is_healthy": True,
                "chunk_size": CHUNK,
                "hash_algorithm": self.hash_algorithm,
                "cache_context_meta": {**contexts, "2": None},
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        if self.busy is not None:
            await self.busy.wait()
        return web.json_response({"status": "healthy"})

    async def tell_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics or "", status=404 if self.metrics is None else 200)

    async def prefetch(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.refusal is not None:
            return web.json_response({"detail": "no layout registered"}, status=self.refusal)
        chunks = len(body["token_ids"]) // CHUNK
        if not chunks:
            return web.json_response({"chunks": 0, "status": "noop"}, status=202)
        told = {"request_id": f"job{chunks}", "chunks": chunks, "status": "submitted"}
        return web.json_response(told, status=202)

    async def poll(self, request: web.Request) -> web.Response:
        self.polled += 1
        name = request.match_info["id"]
        if not name.startswith("job"):
            return web.json_response({"detail": "no such job"}, status=404)
        if self.gate is not None and not self.gate.is_set():
            return web.json_response({"request_id": name, "status": "pending"})
        total = int(name.removeprefix("job"))
        found = total if self.found is None else min(total, self.found)
        told = {"request_id": name, "status": "completed", "found_keys": found}
        return web.json_response({**told, "total_keys": total})


@contextlib.asynccontextmanager
async def serving_fake(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Serve it for the block."""
    async with serving(server.app()) as server.url:
        yield server


CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"


@dataclass
class FakeWorker:
    """A worker of lmcache 0.5.6, as far as a controller sees it; made by `fake_worker`."""

    instance_id: str
    worker_id: int
    context: zmq.asyncio.Context
    push_socket: zmq.asyncio.Socket
    ask_socket: zmq.asyncio.Socket
    port: int
    peer_init_url: str | None = None
    ip: str = "127.0.0.1"
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """By the type of a call; None: no answer."""
    called: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    heartbeat_url: str = ""
    serving: asyncio.Task[None] | None = None

    async def register(self) -> dict[str, Any]:
        answer = await self.ask("RegisterMsg", **self._address())
        if answer["type"] == "RegisterRetMsg":
            self.heartbeat_url = answer["extra_config"]["heartbeat_url"]
        return answer

    async def beat(self, url: str = "") -> dict[str, Any]:
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{url or self.heartbeat_url}")
            return await self._exchange(socket, "HeartbeatMsg", self._address())

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        return await self._exchange(self.ask_socket, kind, fields)

    async def push(self, kind: str, **fields: Any) -> None:
        await self.push_socket.send_multipart([msgspec.msgpack.encode(self._of(kind, fields))])

    async def tell(
        self, op_type: str, keys: Sequence[int], location: str = CPU, *, skipped: int = 0
    ) -> None:
        """Push chunks as the next operations, after ``skipped`` that are not sent."""
        start = self.numbers.get(location, 0) + skipped
        self.numbers[location] = start + len(keys)
        operations = [
            {"op_type": op_type, "key": key, "seq_num": number}
            for number, key in enumerate(keys, start)
        ]
        await self.push("BatchedKVOperationMsg", location=location, operations=operations)

    def _address(self) -> dict[str, Any]:
        return {"ip": self.ip, "port": self.port, "peer_init_url": self.peer_init_url}

    def _of(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "type": kind,
            "instance_id": self.instance_id,
            "worker_id": self.worker_id,
            **fields,
        }

    async def _exchange(
        self, socket: zmq.asyncio.Socket, kind: str, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        await socket.send_multipart([b"", msgspec.msgpack.encode(self._of(kind, fields))])
        answer: dict[str, Any] = msgspec.msgpack.decode((await socket.recv_multipart())[-1])
        return answer

    async def serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            call = msgspec.msgpack.decode(await socket.recv())
            self.called.append(call)
            default = {"type": call["type"].replace("Msg", "RetMsg"), "num_tokens": 0}
            answer = self.answers.get(call["type"], default)
            if answer is None:
                await asyncio.Event().wait()
            await socket.send(msgspec.msgpack.encode(answer))


@contextlib.asynccontextmanager
async def fake_worker(
    ports: Mapping[str, int], instance_id: str = "two", worker_id: int = 0, **fields: Any
) -> AsyncIterator[FakeWorker]:
    """Run one for the block; it has not registered."""
    context = zmq.asyncio.Context()
    calls = context.socket(zmq.REP)
    port = calls.bind_to_random_port("tcp://127.0.0.1")
    push, ask = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    push.connect(f"tcp://127.0.0.1:{ports['pull_port']}")
    ask.connect(f"tcp://127.0.0.1:{ports['reply_port']}")
    made = FakeWorker(instance_id, worker_id, context, push, ask, port, **fields)
    made.serving = asyncio.create_task(made.serve(calls))
    try:
        yield made
    finally:
        made.serving.cancel()
        await asyncio.gather(made.serving, return_exceptions=True)
        context.destroy(linger=0)


CHUNK_TOKENS = 64
TIERS: tuple[wire.TierName, ...] = ("cpu", "disk", "remote")

_T = TypeVar("_T", bound=msgspec.Struct)


class FakeAgent(AgentServer):
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
        """Status and message with which changing calls are refused, if set."""
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
        """End every move."""
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


JSON = {"Content-Type": "application/json"}
TOKENS = list(range(5 * CHUNK_TOKENS + 7))


@dataclass
class Clock:
    """A clock that a test sets."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(kw_only=True)
class Controlled:
    """A running controller, and the instances of its configuration."""

    url: str
    monitor_url: str
    clock: Clock
    controller: Controller
    session: aiohttp.ClientSession
    configured: list[ConfiguredInstance] = field(default_factory=list)

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """POST to the API; return status and answer."""
        return await self._send("POST", self.url + path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._send("GET", self.url + path, None)

    async def tell(self, path: str, body: object) -> tuple[int, Any]:
        """POST to the monitor."""
        return await self._send("POST", self.monitor_url + path, body)

    async def ok(self, path: str, body: object) -> Any:
        """POST to the API what must be answered with 200."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def _send(self, method: str, url: str, body: object) -> tuple[int, Any]:
        data = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        given: dict[str, Any] = {} if body is None else {**data, "headers": JSON}
        async with self.session.request(method, url, **given) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def controlled(
    limit_bytes: int = 1 << 20,
    body_s: float = 60.0,
    access: Access | None = None,
    fleet_secret: FleetSecret | None = None,
) -> AsyncIterator[Controlled]:
    """Run a controller without instances; its event loop must never block."""
    clock, configured = Clock(), list[ConfiguredInstance]()
    with blockbuster_ctx("router"):
        async with client_session() as session, client_session() as client:
            made = Controller(
                lambda: configured,
                session,
                limit_bytes=limit_bytes,
                body_s=body_s,
                access=access,
                fleet_secret=fleet_secret,
                clock=clock,
            )
            async with serving(made.api()) as url, serving(made.monitor()) as monitor_url:
                yield Controlled(
                    url=url,
                    monitor_url=monitor_url,
                    clock=clock,
                    controller=made,
                    session=client,
                    configured=configured,
                )


@contextlib.asynccontextmanager
async def with_agents(control: Controlled, agents: Sequence[FakeAgent]) -> AsyncIterator[list[str]]:
    """Serve agents, and configure them; gives their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(agent.app())) for agent in agents]
        control.configured[:] = [
            ConfiguredInstance(
                id=agent.info["instance_id"], agent_url=url, incarnation=agent.info["incarnation"]
            )
            for agent, url in zip(agents, urls, strict=True)
        ]
        yield urls


def move(**changes: object) -> dict[str, object]:
    """Return a call of ``/move``."""
    cpu = "LocalCPUBackend"
    return {"old_position": ["one", cpu], "new_position": ["two", cpu], "tokens": TOKENS} | changes
