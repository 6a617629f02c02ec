"""The agent: a small HTTP server inside each replica, beside its engine.

It answers what the engine holds, promotes and clears on request, and feeds
routers with what changes (`cacheengine.wire` has the formats). It runs on a
thread and an event loop of its own, so it answers while the model computes,
and while the model is idle.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from cacheengine import wire
from cacheengine.config import EngineConfig
from cacheengine.engine import CacheEngine, Promotion
from cacheengine.keys import HashScheme, chunk_keys, prompt_extra_keys
from cacheengine.metrics import render_metrics

logger = logging.getLogger("vllm.warmroute")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")

_MAX_BODY_BYTES: Final = 32 * 1024**2
_MAX_WAIT_S: Final = 30.0
_START_TIMEOUT_S: Final = 10.0
_EXPIRY_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class AgentIdentity:
    """What ``/info`` says of the replica beside its tiers."""

    instance_id: str
    model: str
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    kv_events_port: int | None = None
    kv_replay_port: int | None = None


class BadCallError(Exception):
    """A request the agent cannot serve as it stands; the text says how to mend it."""


class Agent:
    """Serves one engine over HTTP from `start` to `stop`.

    `start` raises OSError, naming the address, when the port is taken. `stop`
    is idempotent and may be called without a start.
    """

    def __init__(self, engine: CacheEngine, identity: AgentIdentity, config: EngineConfig) -> None:
        self._engine = engine
        self._identity = identity
        self._host = config.agent_host
        self._port = config.lmcache_worker_port
        self._scheme = HashScheme(identity.hash_algorithm, identity.hash_seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self.address: tuple[str, int] | None = None
        """Host and port listened on, once started."""

    def start(self) -> None:
        """Listen; returns when requests are answered."""
        started: threading.Event = threading.Event()
        failure: list[Exception] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except Exception as error:  # noqa: BLE001  raised again by start()
                failure.append(error)
                started.set()

        self._thread = threading.Thread(target=run, name="kv-agent", daemon=True)
        self._thread.start()
        if not started.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"the agent did not start within {_START_TIMEOUT_S} s")
        if failure and isinstance(failure[0], OSError):
            raise OSError(
                f"lmcache_worker_port: cannot listen on {self._host}:{self._port}: {failure[0]}"
            ) from failure[0]
        if failure:
            raise failure[0]

    def stop(self) -> None:
        """Close the listening socket and end the thread."""
        if self._loop is not None and self._stopping is not None:
            _wake(self._loop, self._stopping)
        if self._thread is not None:
            self._thread.join(timeout=_START_TIMEOUT_S)
        self._loop = self._thread = None

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        runner = web.AppRunner(
            self._app(), access_log=None, handle_signals=False, shutdown_timeout=1.0
        )
        await runner.setup()
        expiry = asyncio.create_task(self._expire_pins())
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self.address = runner.addresses[0][:2]
            logger.info("Warmroute agent of %s on %s", self._identity.instance_id, self.address)
            started.set()
            await self._stopping.wait()
        finally:
            expiry.cancel()
            await runner.cleanup()

    async def _expire_pins(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self._engine.expire_pins()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/info", self._info),
                web.post("/lookup", self._lookup),
                web.post("/prefetch", self._prefetch),
                web.get("/snapshot", self._snapshot),
                web.get("/events", self._events),
                web.post("/clear", self._clear),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        identity = self._identity
        return _json(
            wire.InstanceInfo(
                instance_id=identity.instance_id,
                incarnation=self._engine.incarnation,
                model=identity.model,
                hash_algorithm=identity.hash_algorithm,
                hash_seed=identity.hash_seed,
                block_tokens=identity.block_tokens,
                chunk_tokens=identity.chunk_tokens,
                chunk_bytes=identity.chunk_bytes,
                tiers=self._engine.tier_info(),
                kv_events_port=identity.kv_events_port,
                kv_replay_port=identity.kv_replay_port,
                version=version("warmroute"),
            )
        )

    async def _lookup(self, request: web.Request) -> web.Response:
        call = await _decode(request, wire.LookupRequest)
        keys = self._keys_of(call)
        tiers = self._engine.match(keys)
        by_tier: dict[str, int] = {}
        for tier in tiers:
            by_tier[tier] = by_tier.get(tier, 0) + self._identity.chunk_tokens
        return _json(
            wire.LookupReply(
                matched_tokens=len(tiers) * self._identity.chunk_tokens,
                tokens_by_tier=by_tier,
                tiers=tiers,
            )
        )

    def _keys_of(self, call: wire.LookupRequest) -> list[bytes]:
        if (call.tokens is None) == (call.keys is None):
            raise BadCallError("give either 'tokens' or 'keys', one of them")
        if call.keys is not None:
            return _digests(call.keys)
        extra, first = prompt_extra_keys(cache_salt=call.cache_salt)
        chain = self._scheme.chain(
            call.tokens or [],
            self._identity.block_tokens,
            extra_keys=extra,
            first_extra_keys=first,
        )
        return chunk_keys(chain, self._identity.chunk_tokens // self._identity.block_tokens)

    async def _prefetch(self, request: web.Request) -> web.Response:
        call = await _decode(request, wire.PrefetchRequest)
        if not 0 <= call.pin_s <= 3600:
            raise BadCallError(f"'pin_s' is {call.pin_s}; give seconds from 0 to 3600")
        promotion = self._engine.promote(_digests(call.keys), pin_s=call.pin_s)
        await _wait_for(promotion, min(call.wait_s, _MAX_WAIT_S))
        # All counts of one moment: reads go on.
        counts = promotion.counts
        return _json(
            wire.PrefetchReply(
                resident=counts.resident,
                promoted=counts.promoted,
                pending=counts.pending,
                missing=counts.missing,
                promoted_bytes=counts.promoted * self._identity.chunk_bytes,
            )
        )

    async def _snapshot(self, request: web.Request) -> web.Response:
        # A million keys take a second to pack: not on the loop.
        snapshot = await asyncio.to_thread(self._engine.snapshot)
        return _msgpack(snapshot)

    async def _events(self, request: web.Request) -> web.Response:
        after = _number(request, "after", int, default=0)
        wait_s = min(_number(request, "wait_s", float, default=0.0), _MAX_WAIT_S)
        incarnation = request.query.get("incarnation", self._engine.incarnation)
        if incarnation == self._engine.incarnation:
            await self._wait_for_event(after, wait_s)
            batch = self._engine.events_after(after)
            if batch is not None:
                return _msgpack(batch)
        return web.json_response(
            {"error": f"events after {after} of {incarnation} are gone; take a new /snapshot"},
            status=410,
        )

    async def _wait_for_event(self, after: int, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        # The listener is there before the check, so an event between the two
        # still wakes this call.
        forget = self._engine.add_event_listener(lambda: _wake(loop, news))
        try:
            if self._engine.last_seq <= after and wait_s > 0:
                async with asyncio.timeout(wait_s):
                    await news.wait()
        except TimeoutError:
            pass
        finally:
            forget()

    async def _clear(self, request: web.Request) -> web.Response:
        call = await _decode(request, wire.ClearRequest)
        dropped = await asyncio.to_thread(self._engine.clear, call.tiers)
        return _json(wire.ClearReply(dropped=dropped))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=render_metrics(self._engine), content_type="text/plain", charset="utf-8"
        )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refusal as ``{"error": text}``."""
    try:
        return await handler(request)
    except BadCallError as error:
        return web.json_response({"error": f"{request.path}: {error}"}, status=400)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)


async def _decode(request: web.Request, kind: type[_T]) -> _T:
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise BadCallError(f"the body is not a {kind.__name__}: {error}") from None


def _digests(keys: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise BadCallError("'keys' are whole digests in hex, two digits a byte") from None


def _number(request: web.Request, name: str, kind: type[_T], *, default: _T) -> _T:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        return kind(text)  # type: ignore[call-arg]
    except ValueError:
        raise BadCallError(f"'{name}' is {text!r}, not a number") from None


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set ``event`` from an engine thread."""
    # RuntimeError: the agent stopped, and nobody waits any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


async def _wait_for(promotion: Promotion, wait_s: float) -> None:
    """Return when the promotion is done, or after ``wait_s``."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    promotion.add_done_callback(lambda: _wake(loop, done))
    try:
        async with asyncio.timeout(wait_s):
            await done.wait()
    except TimeoutError:
        pass


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _msgpack(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(value), content_type=wire.MSGPACK)
