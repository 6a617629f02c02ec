"""The controller's API: LMCache's requests, done by the agents of the instances."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

from aiohttp import web

from router.agent_client import AgentClient
from router.controller import calls
from router.controller.agents import (
    AcceptedMove,
    AgentCalls,
    check_in_reach,
    progress,
    source_address,
)
from router.controller.calls import answering
from router.controller.others import OtherInstances
from router.controller.registry import Instance, Registry
from warmroute_common.agent_protocol import ClearRequest, MoveRequest, MoveSource, PinRequest
from warmroute_common.api_errors import ApiError, NotFoundError, UpstreamFailedError
from warmroute_common.http_server import as_json

MAX_EVENTS: Final = 1000
"""So many of the latest events are remembered."""
_UNREACHABLE: Final = 1
"""The error code of an agent that does not answer; 0 is that of a healthy one."""
_LONGEST_NAMES: Final = 1000

Answer = dict[str, Any]


class ControllerApi:
    """Handlers of the API's port."""

    def __init__(
        self,
        registry: Registry,
        agents: AgentCalls,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        beside: Callable[[], list[dict[str, Any]]] = list,
        others: OtherInstances | None = None,
    ) -> None:
        """``beside`` tells the instances that are not the registry's, ``others`` calls them."""
        self._registry = registry
        self._agents = agents
        self._clock = clock
        self._wall_clock = wall_clock
        self._beside = beside
        self._others = others
        self._events: dict[str, AcceptedMove | int] = {}
        """What was asked, by event id: of what was done at once, how many tokens it was."""

    def routes(self) -> list[web.RouteDef]:
        """Return the API's routes."""
        return [
            answering("/lookup", calls.LookupCall, self.lookup),
            answering("/move", calls.MoveCall, self.move),
            answering("/check_finish", calls.CheckFinishCall, self.check_finish),
            answering("/pin", calls.PinCall, partial(self._pin, "Pin")),
            answering("/unpin", calls.PinCall, partial(self._pin, "Unpin")),
            answering("/clear", calls.ClearCall, self.clear),
            answering("/health", calls.HealthCall, self.health),
            web.get("/health", self.own_health),
            answering("/query_worker_info", calls.WorkerInfoCall, self.query_worker_info),
            web.get("/instances", self.instances),
            web.post("/register", self.register),
        ]

    # --- what is where

    async def lookup(self, call: calls.LookupCall) -> Answer:
        """Answer, by instance, the location that holds most of a prompt, and how many tokens.

        LMCache's page shows the instances at the top level, its code under
        ``layout_info``: both are there. Instances that hold nothing are left
        out; instances that did not answer are under ``errors``.
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
        if self._others is not None:
            held, unknown = self._others.lookup(call.tokens, call.cache_salt)
            layout, errors = held | layout, unknown | errors
        elif errors and len(errors) == len(instances):
            raise UpstreamFailedError("no instance answers: " + "; ".join(errors.values()))
        own = {"event_id": _new_event_id("Lookup"), "layout_info": layout}
        return {**layout, **own, **({"errors": errors} if errors else {})}

    async def instances(self, request: web.Request) -> web.Response:
        """Answer which instances there are, and when their heartbeats came; LMCache's too."""
        now_s = self._clock()
        found = [each.listing(now_s) for each in self._registry.instances()]
        return as_json({"instances": found + self._beside()})

    # --- moving

    async def move(self, call: calls.MoveCall) -> Answer:
        """Have one instance fetch a prompt's chunks from another; the bytes follow the answer.

        Or from another tier of its own.
        """
        (source_id, old), (target_id, new) = call.old_position, call.new_position
        if others := self._other(source_id) or self._other(target_id):
            tokens = await others.move(
                call.old_position,
                call.new_position,
                call.tokens,
                call.cache_salt,
                copy=bool(call.copy),
            )
            return self._accepted("Move", tokens)
        source = self._found(source_id, "old_position")
        target = self._found(target_id, "new_position")
        check_in_reach(source, target)
        source_info, target_info = await asyncio.gather(
            *(self._agents.ask(each, AgentClient.info) for each in (source, target))
        )
        wanted = MoveRequest(
            source=MoveSource(
                agent_url=source.agent_url,
                transfer_address=source_address(source, source_info, target_info),
                tier=calls.TIER_OF[old],
            ),
            tier=calls.TIER_OF[new],
            tokens=call.tokens,
            cache_salt=call.cache_salt,
            copy=bool(call.copy),
        )
        reply = await self._agents.ask(target, lambda agent: agent.move(wanted))
        move = AcceptedMove(
            destination=target,
            agent_event_id=reply.event_id,
            num_tokens=reply.num_tokens,
            chunk_tokens=target_info.chunk_tokens,
        )
        return self._accepted("Move", reply.num_tokens, move)

    async def check_finish(self, call: calls.CheckFinishCall) -> Answer:
        """Answer ``running``, ``done``, ``failed`` or ``not_found``, and what has arrived."""
        move = self._events.get(call.event_id)
        if move is None:
            text = f"no such event, or older than the latest {MAX_EVENTS}"
            return {"status": "not_found", "error": text}
        if isinstance(move, int):
            return {"status": "done", "num_tokens": move}
        status = await self._agents.status(move)
        if status is None:
            text = f"{move.destination.id} does not know the move: it has started anew since"
            return {"status": "not_found", "error": text}
        return progress(move, status)

    # --- keeping and dropping

    async def _pin(self, kind: Literal["Pin", "Unpin"], call: calls.PinCall) -> Answer:
        """Keep a prompt's chunks in a location until they are unpinned or cleared; or end that."""
        if others := self._other(call.instance_id):
            ask = others.pin if kind == "Pin" else others.unpin
            where = (call.instance_id, call.location)
            return self._accepted(kind, await ask(*where, call.tokens, call.cache_salt))
        act = AgentClient.pin if kind == "Pin" else AgentClient.unpin
        tier = calls.TIER_OF[call.location]
        wanted = PinRequest(tokens=call.tokens, cache_salt=call.cache_salt, tier=tier)
        instance = self._found(call.instance_id)
        reply = await self._agents.ask(instance, lambda agent: act(agent, wanted))
        return self._accepted(kind, reply.num_tokens)

    async def clear(self, call: calls.ClearCall) -> Answer:
        """Drop a prompt's chunks, or all, from one location, several, or all.

        ``num_tokens`` counts a chunk once for each location it was dropped
        from; ``dropped_tokens`` has them apart.
        """
        if others := self._other(call.instance_id):
            all_tokens = call.tokens is None
            dropped = await others.clear(call.instance_id, call.names(), all_tokens=all_tokens)
            return self._cleared(dropped)
        instance = self._found(call.instance_id)
        wanted = ClearRequest(tiers=call.tiers(), tokens=call.tokens, cache_salt=call.cache_salt)
        info = await self._agents.ask(instance, AgentClient.info)
        reply = await self._agents.ask(instance, lambda agent: agent.clear(wanted))
        return self._cleared(
            {
                calls.LOCATION_OF.get(tier, tier): chunks * info.chunk_tokens
                for tier, chunks in reply.dropped.items()
            }
        )

    # --- health

    async def health(self, call: calls.HealthCall) -> Answer:
        """Answer the error code of an instance's agent, or of each of its workers: 0 for well."""
        if others := self._other(call.instance_id):
            codes, errors = await others.health(call.instance_id)
            found = {"event_id": _new_event_id("Health"), "error_codes": _by_text(codes)}
            return found | ({"errors": _by_text(errors)} if errors else {})
        instance = self._found(call.instance_id)
        answer: Answer = {"event_id": _new_event_id("Health"), "error_codes": {"0": 0}}
        try:
            await self._agents.ask(instance, AgentClient.health)
        except ApiError as error:
            answer |= {"error_codes": {"0": _UNREACHABLE}, "errors": {"0": error.message}}
        return answer

    async def own_health(self, request: web.Request) -> web.Response:
        """Answer a probe: the controller itself is well."""
        return as_json({"status": "ok", "instances": len(self._names())})

    async def query_worker_info(self, call: calls.WorkerInfoCall) -> Answer:
        """Answer where an instance's agent or workers are, and when they registered.

        In seconds since 1970.
        """
        event_id = _new_event_id("QueryWorkerInfo")
        since_wall_s = self._wall_clock() - self._clock()
        if others := self._other(call.instance_id):
            infos = others.worker_infos(call.instance_id, call.worker_ids, since_wall_s)
            return {"event_id": event_id, "worker_infos": infos}
        instance = self._found(call.instance_id)
        if strange := [each for each in call.worker_ids if each != 0]:
            raise NotFoundError(
                f"'{instance.id}' has no worker {strange[0]}: an instance has one agent, worker 0",
                param="worker_ids",
            )
        return {"event_id": event_id, "worker_infos": [instance.worker_info(since_wall_s)]}

    async def register(self, request: web.Request) -> web.Response:
        """Say where that is done."""
        raise NotFoundError(
            "this is the controller's API; replicas register at its monitor port: write that "
            "of controller.monitor_port in their controller_url"
        )

    # --- parts of the above

    def _found(self, name: str, param: str = "instance_id") -> Instance:
        instance = self._registry.find(name)
        if instance is None:
            known = ", ".join(self._names()) or "none at all"
            raise NotFoundError(
                f"no instance '{name}'; known are {known[:_LONGEST_NAMES]}",
                param=param,
                code="unknown_instance",
            )
        return instance

    def _other(self, name: str) -> OtherInstances | None:
        """Return what answers for an instance that has no agent; None for one that has."""
        others = self._others
        if others is None or name not in others.instances() or self._registry.find(name):
            return None
        return others

    def _names(self) -> list[str]:
        others = () if self._others is None else self._others.instances()
        return [*(each.id for each in self._registry.instances()), *others]

    def _cleared(self, dropped: dict[str, int]) -> Answer:
        return self._accepted("Clear", sum(dropped.values()), success=True, dropped_tokens=dropped)

    def _accepted(
        self, kind: str, num_tokens: int, move: AcceptedMove | None = None, **more: object
    ) -> Answer:
        event_id = _new_event_id(kind)
        self._events[event_id] = num_tokens if move is None else move
        if len(self._events) > MAX_EVENTS:
            del self._events[next(iter(self._events))]
        return {"event_id": event_id, "num_tokens": num_tokens, **more}


def _by_text(values: Mapping[int, object]) -> Answer:
    return {str(name): each for name, each in values.items()}


def _new_event_id(kind: str) -> str:
    """Return an id that begins with what was asked, as LMCache's do."""
    return f"{kind}{uuid.uuid4()}"
