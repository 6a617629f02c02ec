"""What the agent is asked about moves into its replica."""

from typing import Final

from aiohttp import web

from cacheengine import wire
from cacheengine.agent.answers import NotKnownError, as_json, decode, number, seconds
from cacheengine.agent.identity import AgentIdentity
from cacheengine.agent.moves.moves import Moves
from cacheengine.agent.prompts import Prompts
from cacheengine.agent.waiting import MAX_WAIT_S, wait_for_event

_LEAST_STALL_S: Final = 0.1


class Moving:
    """Handlers of ``/move`` and ``/moves/EVENT_ID``."""

    def __init__(self, moves: Moves, identity: AgentIdentity, prompts: Prompts) -> None:
        self._moves = moves
        self._identity = identity
        self._prompts = prompts

    def routes(self) -> list[web.RouteDef]:
        """Return the paths served here."""
        return [web.post("/move", self.move), web.get("/moves/{event_id}", self.status)]

    async def move(self, request: web.Request) -> web.Response:
        """Begin a move into this replica."""
        call = await decode(request, wire.MoveRequest)
        seconds("pin_s", call.pin_s)
        seconds("stall_s", call.stall_s, least=_LEAST_STALL_S)
        move = await self._moves.begin(call, self._prompts.some_keys_of(call))
        num_tokens = len(move.keys) * self._identity.chunk_tokens
        return as_json(wire.MoveReply(event_id=move.event_id, num_tokens=num_tokens))

    async def status(self, request: web.Request) -> web.Response:
        """Say how a move goes, when it is over or after ``wait_s``."""
        event_id = request.match_info["event_id"]
        move = self._moves.get(event_id)
        if move is None:
            raise NotKnownError("no such move, or it is long over")
        wait_s = seconds("wait_s", number(request, "wait_s", float, default=0.0))
        await wait_for_event(move.over, min(wait_s, MAX_WAIT_S))
        return as_json(move.status())
