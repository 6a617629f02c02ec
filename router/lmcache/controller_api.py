"""LMCache's controller API: lookup, move, pin, clear, check_finish and health.

Instances with our engine are called through their agents, instances with LMCache inside vLLM
through `WorkerControl`. Names and shapes are LMCache's; ``cache_salt`` is vLLM's. Unknown fields
are refused, because a misspelled ``tokens`` would make a ``/clear`` of some chunks clear all of
them; so are empty lists, for the same reason.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta

from router.agent_client import AgentClient, AgentError, AgentRefusedError, AgentTimeoutError
from router.lmcache.instance_registry import Instance, InstanceRegistry
from router.lmcache.lmcache import Lmcache
from router.lmcache.worker_control import WorkerControl, unsupported
from router.staging.stager import transfer_address
from warmroute_common.addresses import is_loopback_url
from warmroute_common.agent_protocol import (
    UNREADABLE,
    ClearRequest,
    InstanceInfo,
    LookupRequest,
    MoveRequest,
    MoveSource,
    MoveStatus,
    PinRequest,
    TierName,
)
from warmroute_common.api_errors import (
    ApiError,
    BadRequestError,
    ConflictError,
    NotFoundError,
    NotSupportedError,
    OverloadedError,
    TooLargeError,
    UpstreamFailedError,
    UpstreamTimeoutError,
)
from warmroute_common.decoding import decode_json
from warmroute_common.fleet_secret import FleetSecret
from warmroute_common.http_server import as_json, read_body

MAX_EVENTS: Final = 1000
"""How many of the latest events ``/check_finish`` knows."""
MAX_CALLS: Final = 64
"""Calls to agents at the same time; further ones wait."""
_UNREACHABLE: Final = 1
"""Error code of an agent that does not answer; 0 is that of a healthy one."""
_LONGEST_NAMES: Final = 1000
_LONGEST_ERROR: Final = 500
_REFUSALS: Final[dict[int, type[ApiError]]] = {
    400: BadRequestError,
    409: ConflictError,
    413: TooLargeError,
    503: OverloadedError,
}
"""Errors of an agent that concern the caller and are passed on."""
_NOT_SERVED: Final = {
    "/query_worker_info": "it; GET /instances lists the instances",
    "/compress": "it; set remote_serde where the replica's cache is configured",
    "/decompress": "it; set remote_serde where the replica's cache is configured",
}
"""Calls of LMCache's controller that are refused by name."""

Location = Literal["LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"]
"""LMCache's names of the tiers, fastest first."""
TIER_OF: Final[dict[Location, TierName]] = {
    "LocalCPUBackend": "cpu",
    "LocalDiskBackend": "disk",
    "RemoteBackend": "remote",
}
_LOCATION_OF: Final[dict[str, Location]] = {tier: name for name, tier in TIER_OF.items()}

_Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Tokens = Annotated[list[_Token], Meta(min_length=1)]
"""A prompt's token ids from the first one; vLLM's ``POST /tokenize`` returns them."""
_Position = tuple[str, Location]
"""An instance's id, and a location."""
_Reply = dict[str, Any]
_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


# --- requests


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LookupCall(_Call, frozen=True):
    """``POST /lookup``."""

    tokens: list[_Token]
    cache_salt: str | None = None


class PinCall(_Call, frozen=True):
    """``POST /pin`` and ``/unpin``."""

    instance_id: str
    location: Location
    tokens: _Tokens
    cache_salt: str | None = None


class ClearCall(_Call, frozen=True):
    """``POST /clear``: one location (LMCache's code), several (its documentation), or all."""

    instance_id: str
    location: Location | None = None
    locations: Annotated[list[Location], Meta(min_length=1)] | None = None
    tokens: _Tokens | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.location is not None and self.locations is not None:
            raise ValueError("give either 'location' or 'locations', not both")

    def tiers(self) -> list[TierName] | None:
        """Return the tiers to clear, None for all."""
        names = self.names()
        return None if names is None else [TIER_OF[each] for each in names]

    def names(self) -> list[Location] | None:
        """Return the locations to clear, each once; None for all."""
        locations = self.locations if self.location is None else [self.location]
        return None if locations is None else list(dict.fromkeys(locations))


class MoveCall(_Call, frozen=True):
    """``POST /move``."""

    old_position: _Position
    new_position: _Position
    tokens: _Tokens
    copy: bool | None = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.old_position == self.new_position:
            raise ValueError("both positions are the same")


class CheckFinishCall(_Call, frozen=True):
    """``POST /check_finish``."""

    event_id: str


class HealthCall(_Call, frozen=True):
    """``POST /health``."""

    instance_id: str


def post_route(
    path: str, kind: type[_Struct], answer: Callable[[_Struct], Awaitable[dict[str, Any]]]
) -> web.RouteDef:
    """Return a POST route: its body is a ``kind``, its answer a JSON object."""

    async def handler(request: web.Request) -> web.Response:
        return as_json(await answer(await read_json(request, kind)))

    return web.post(path, handler)


async def read_json(request: web.Request, kind: type[_Struct]) -> _Struct:
    """Return a request's body; raise `BadRequestError` or `TooLargeError`.

    The body must be declared as JSON: a form in a web page cannot do that.
    """
    if request.content_type != "application/json":
        raise BadRequestError(f"{request.path}: send 'Content-Type: application/json'")
    body = await read_body(request)
    try:
        return decode_json(body, kind)
    except UNREADABLE as error:
        raise BadRequestError(f"{request.path}: {error}; it takes {_fields(kind)}") from None


def _fields(kind: type[msgspec.Struct]) -> str:
    """Return the fields of a request, for an error message."""
    fields = msgspec.structs.fields(kind)
    required = [each.name for each in fields if each.required]
    optional = [each.name for each in fields if not each.required]
    text = f"a JSON object with {', '.join(required)}"
    if optional:
        text += f" and optionally {', '.join(optional)}"
    if any("location" in each.name or "position" in each.name for each in fields):
        text += f"; locations are {', '.join(TIER_OF)}"
    return text


# --- calls to agents


@dataclass(kw_only=True)
class AcceptedMove:
    """A move that an agent has accepted."""

    destination: Instance
    agent_event_id: str
    num_tokens: int
    chunk_tokens: int
    final: MoveStatus | None = None
    """How it ended, once known: its agent may forget it."""

    def progress(self, status: MoveStatus) -> _Reply:
        """Return the answer to ``/check_finish``."""
        reply = {
            "status": status.state,
            "num_tokens": self.num_tokens,
            "arrived_tokens": status.arrived_chunks * self.chunk_tokens,
            "moved_bytes": status.moved_bytes,
        }
        why = status.error or status.note
        return {**reply, "error": why} if why else reply


class AgentCaller:
    """Calls agents; their errors become `ApiError` with the instance's name."""

    def __init__(self, session: aiohttp.ClientSession, secret: FleetSecret | None) -> None:
        self._session = session
        self._secret = secret
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def call(self, instance: Instance, call: Callable[[AgentClient], Awaitable[_T]]) -> _T:
        """Return an agent's answer; raise `ApiError`."""
        try:
            async with self._slots:
                return await call(AgentClient(self._session, instance.agent_url, self._secret))
        except AgentError as error:
            raise _api_error(instance.id, error) from None

    async def longest(self, instance: Instance, call: LookupCall) -> tuple[Location, int] | None:
        """Return the location that holds most of a prompt, and how many tokens of it.

        The fastest such location; None if none holds any. Raises `ApiError`.
        """

        async def held(tier: TierName) -> int:
            request = LookupRequest(tokens=call.tokens, cache_salt=call.cache_salt, tier=tier)
            reply = await self.call(instance, lambda agent: agent.lookup(request))
            return reply.matched_tokens

        counts = await asyncio.gather(*map(held, TIER_OF.values()))
        # max() returns the first of equals, and the fastest location stands first.
        location, tokens = max(zip(TIER_OF, counts, strict=True), key=lambda each: each[1])
        return (location, tokens) if tokens else None

    async def move_status(self, move: AcceptedMove) -> MoveStatus | None:
        """Return the state of a move; None if its agent does not know it. Raises `ApiError`."""

        async def status_or_none(agent: AgentClient) -> MoveStatus | None:
            try:
                return await agent.move_status(move.agent_event_id)
            except AgentRefusedError as error:
                if error.status == 404:
                    return None
                raise

        if move.final is None:
            status = await self.call(move.destination, status_or_none)
            if status is None or status.state == "running":
                return status
            move.final = status
        return move.final


def _api_error(name: str, error: AgentError) -> ApiError:
    text = f"{name}: {error}"[:_LONGEST_ERROR]
    if isinstance(error, AgentTimeoutError):
        return UpstreamTimeoutError(text)
    if isinstance(error, AgentRefusedError) and error.status in _REFUSALS:
        return _REFUSALS[error.status](f"{name}: {error.said}"[:_LONGEST_ERROR])
    return UpstreamFailedError(text)


def _check_reachable(source: Instance, target: Instance) -> None:
    """Raise `ConflictError` if the source's address means another machine to the target."""
    if is_loopback_url(source.agent_url) and not is_loopback_url(target.agent_url):
        raise ConflictError(
            f"{target.id}, at {target.agent_url}, cannot reach {source.id} at "
            f"{source.agent_url}, a loopback address: give {source.id} an agent_url that other "
            "machines can use",
            param="old_position",
        )


def _source_address(source: Instance, source_info: InstanceInfo, target: InstanceInfo) -> str:
    """Return where the target fetches the source's chunks; raise `ConflictError` if it cannot."""
    if source_info.incarnation == target.incarnation:
        return ""  # Between tiers of one replica nothing is sent.
    if source_info.layout != target.layout:
        names = ("model", "hash_algorithm", "hash_seed", "block_tokens", "chunk_tokens")
        differing = [
            f"{name} {getattr(source_info, name)} and {getattr(target, name)}"
            for name in names
            if getattr(source_info, name) != getattr(target, name)
        ]
        why = "; ".join(differing) or "dtype, weights, parallel layout or vLLM's options"
        raise ConflictError(f"the two instances' chunks are not compatible: they differ in {why}")
    if source_info.transfer_port is None:
        raise ConflictError(
            f"'{source.id}' does not send chunks: set distributed_url in its configuration",
            param="old_position",
        )
    return transfer_address(source.agent_url, source_info.transfer_port)


# --- the API


class ControllerApi:
    """Handlers of the API's port."""

    def __init__(
        self,
        registry: InstanceRegistry,
        agents: AgentCaller,
        clock: Callable[[], float],
        *,
        lmcache: Lmcache | None = None,
    ) -> None:
        self._registry = registry
        self._agents = agents
        self._clock = clock
        self._lmcache = lmcache
        workers = None if lmcache is None else lmcache.workers
        self._workers = None if workers is None else workers.control
        self._events: dict[str, AcceptedMove | int] = {}
        """Moves by event id; for calls that were done at once, how many tokens they concerned."""

    def routes(self) -> list[web.RouteDef]:
        served = [
            post_route("/lookup", LookupCall, self.lookup),
            post_route("/move", MoveCall, self.move),
            post_route("/check_finish", CheckFinishCall, self.check_finish),
            post_route("/pin", PinCall, partial(self._pin, "Pin")),
            post_route("/unpin", PinCall, partial(self._pin, "Unpin")),
            post_route("/clear", ClearCall, self.clear),
            post_route("/health", HealthCall, self.health),
            web.get("/health", self.own_health),
            web.get("/instances", self.instances),
            web.post("/register", self.register),
        ]
        return served + [web.post(path, self.not_served) for path in _NOT_SERVED]

    async def lookup(self, call: LookupCall) -> _Reply:
        """Answer, by instance, the location that holds most of a prompt, and how many tokens.

        LMCache's documentation shows the instances at the top level, its code under
        ``layout_info``: both are there. Instances that hold nothing are left out; instances that
        did not answer are under ``errors``.
        """
        instances = self._registry.instances() if call.tokens else []
        answers = await asyncio.gather(
            *(self._agents.longest(each, call) for each in instances), return_exceptions=True
        )
        layout: dict[str, tuple[str, int]] = {}
        errors: dict[str, str] = {}
        for each, answer in zip(instances, answers, strict=True):
            if isinstance(answer, ApiError):
                errors[each.id] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                layout[each.id] = answer
        if self._workers is not None:
            held, unknown = self._workers.lookup(call.tokens, call.cache_salt)
            layout, errors = held | layout, unknown | errors
        elif errors and len(errors) == len(instances):
            raise UpstreamFailedError("no instance answers: " + "; ".join(errors.values()))
        own = {"event_id": _new_event_id("Lookup"), "layout_info": layout}
        return {**layout, **own, **({"errors": errors} if errors else {})}

    async def instances(self, request: web.Request) -> web.Response:
        """Answer all instances with the age of their heartbeats; LMCache's servers too."""
        now_s = self._clock()
        found = [each.listing(now_s) for each in self._registry.instances()]
        if self._lmcache is not None:
            found += self._lmcache.listing()
        return as_json({"instances": found})

    async def move(self, call: MoveCall) -> _Reply:
        """Make an instance fetch a prompt's chunks from another one, or from another tier.

        The answer does not wait for the bytes, except with LMCache inside vLLM.
        """
        (source_id, old), (target_id, new) = call.old_position, call.new_position
        if workers := self._workers_of(source_id) or self._workers_of(target_id):
            tokens = await workers.move(
                call.old_position,
                call.new_position,
                call.tokens,
                call.cache_salt,
                copy=bool(call.copy),
            )
            return self._accepted("Move", tokens)
        source = self._found(source_id, "old_position")
        target = self._found(target_id, "new_position")
        _check_reachable(source, target)
        source_info, target_info = await asyncio.gather(
            *(self._agents.call(each, AgentClient.info) for each in (source, target))
        )
        request = MoveRequest(
            source=MoveSource(
                agent_url=source.agent_url,
                transfer_address=_source_address(source, source_info, target_info),
                tier=TIER_OF[old],
            ),
            tier=TIER_OF[new],
            tokens=call.tokens,
            cache_salt=call.cache_salt,
            copy=bool(call.copy),
        )
        reply = await self._agents.call(target, lambda agent: agent.move(request))
        move = AcceptedMove(
            destination=target,
            agent_event_id=reply.event_id,
            num_tokens=reply.num_tokens,
            chunk_tokens=target_info.chunk_tokens,
        )
        return self._accepted("Move", reply.num_tokens, move)

    async def check_finish(self, call: CheckFinishCall) -> _Reply:
        """Answer ``running``, ``done``, ``failed`` or ``not_found``, and what has arrived."""
        move = self._events.get(call.event_id)
        if move is None:
            text = f"the event is unknown, or older than the latest {MAX_EVENTS}"
            return {"status": "not_found", "error": text}
        if isinstance(move, int):
            return {"status": "done", "num_tokens": move}
        status = await self._agents.move_status(move)
        if status is None:
            text = f"{move.destination.id} does not know the move: it has restarted since"
            return {"status": "not_found", "error": text}
        return move.progress(status)

    async def _pin(self, kind: Literal["Pin", "Unpin"], call: PinCall) -> _Reply:
        """Keep a prompt's chunks in a location until they are unpinned or cleared; or unpin."""
        if self._workers_of(call.instance_id):
            raise unsupported(
                f"is not asked to {kind.lower()}: Warmroute only serves lookup, "
                "move and clear for it"
            )
        act = AgentClient.pin if kind == "Pin" else AgentClient.unpin
        tier = TIER_OF[call.location]
        request = PinRequest(tokens=call.tokens, cache_salt=call.cache_salt, tier=tier)
        instance = self._found(call.instance_id)
        reply = await self._agents.call(instance, lambda agent: act(agent, request))
        return self._accepted(kind, reply.num_tokens)

    async def clear(self, call: ClearCall) -> _Reply:
        """Drop a prompt's chunks, or all, from one location, several, or all.

        ``num_tokens`` counts a chunk once per location; ``dropped_tokens`` lists them by location.
        """
        if workers := self._workers_of(call.instance_id):
            all_tokens = call.tokens is None
            return self._cleared(
                await workers.clear(call.instance_id, call.names(), all_tokens=all_tokens)
            )
        instance = self._found(call.instance_id)
        request = ClearRequest(tiers=call.tiers(), tokens=call.tokens, cache_salt=call.cache_salt)
        info = await self._agents.call(instance, AgentClient.info)
        reply = await self._agents.call(instance, lambda agent: agent.clear(request))
        return self._cleared(
            {
                _LOCATION_OF.get(tier, tier): chunks * info.chunk_tokens
                for tier, chunks in reply.dropped.items()
            }
        )

    async def health(self, call: HealthCall) -> _Reply:
        """Answer the error code of an instance's agent, 0 if it is healthy."""
        if self._workers_of(call.instance_id):
            raise unsupported("is not asked for its health: GET /instances has its heartbeats")
        instance = self._found(call.instance_id)
        reply: _Reply = {"event_id": _new_event_id("Health"), "error_codes": {"0": 0}}
        try:
            await self._agents.call(instance, AgentClient.health)
        except ApiError as error:
            reply |= {"error_codes": {"0": _UNREACHABLE}, "errors": {"0": error.message}}
        return reply

    async def own_health(self, request: web.Request) -> web.Response:
        """Answer a probe of the controller itself."""
        return as_json({"status": "ok", "instances": len(self._names())})

    async def register(self, request: web.Request) -> web.Response:
        """Refuse an agent that registers at the wrong port."""
        raise NotFoundError(
            "this is the controller's API; replicas register at its monitor port: write that "
            "of controller.monitor_port in their controller_url"
        )

    async def not_served(self, request: web.Request) -> web.Response:
        raise NotSupportedError(
            f"{request.path} is a call of LMCache's controller, and Warmroute does not serve "
            f"{_NOT_SERVED[request.path]}"
        )

    # --- parts of the above

    def _found(self, name: str, param: str = "instance_id") -> Instance:
        instance = self._registry.find(name)
        if instance is None:
            known = ", ".join(self._names()) or "none"
            raise NotFoundError(
                f"no instance '{name}'; known instances: {known[:_LONGEST_NAMES]}",
                param=param,
                code="unknown_instance",
            )
        return instance

    def _workers_of(self, name: str) -> WorkerControl | None:
        """Return what calls LMCache inside an instance; None for an instance with an agent."""
        workers = self._workers
        if workers is None or name not in workers.instances() or self._registry.find(name):
            return None
        return workers

    def _names(self) -> list[str]:
        workers = () if self._workers is None else self._workers.instances()
        return [*(each.id for each in self._registry.instances()), *workers]

    def _cleared(self, dropped: dict[str, int]) -> _Reply:
        return self._accepted("Clear", sum(dropped.values()), success=True, dropped_tokens=dropped)

    def _accepted(
        self, kind: str, num_tokens: int, move: AcceptedMove | None = None, **more: object
    ) -> _Reply:
        event_id = _new_event_id(kind)
        self._events[event_id] = num_tokens if move is None else move
        if len(self._events) > MAX_EVENTS:
            del self._events[next(iter(self._events))]
        return {"event_id": event_id, "num_tokens": num_tokens, **more}


def _new_event_id(kind: str) -> str:
    """Return an id that begins with the call's name, as LMCache's do."""
    return f"{kind}{uuid.uuid4()}"
