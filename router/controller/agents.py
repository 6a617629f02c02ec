"""Asking instances' agents on behalf of the controller's callers: what they hold, and to move it.

Not more than so many calls at once, each with an end; what goes wrong becomes
the `ApiError` that the caller gets, with the instance's name in it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp

from router.agent_client import AgentClient, AgentError, AgentRefusedError, AgentTimeoutError
from router.config import is_loopback_url
from router.controller.calls import TIER_OF, Location, LookupCall
from router.controller.registry import Instance
from router.staging import transfer_address
from warmroute_common.agent_protocol import InstanceInfo, LookupRequest, MoveStatus, TierName
from warmroute_common.api_errors import (
    ApiError,
    BadRequestError,
    ConflictError,
    OverloadedError,
    TooLargeError,
    UpstreamFailedError,
    UpstreamTimeoutError,
)
from warmroute_common.fleet_secret import FleetSecret

MAX_CALLS: Final = 64
"""Calls to agents at once; more wait for their turn."""
_LONGEST_ERROR: Final = 500
_REFUSALS: Final[dict[int, type[ApiError]]] = {
    400: BadRequestError,
    409: ConflictError,
    413: TooLargeError,
    503: OverloadedError,
}
"""Refusals of an agent's that concern the caller, and are told in the agent's own words."""

_T = TypeVar("_T")


@dataclass(kw_only=True)
class AcceptedMove:
    """A move that an agent has accepted, and will be asked about."""

    destination: Instance
    agent_event_id: str
    num_tokens: int
    chunk_tokens: int
    final: MoveStatus | None = None
    """How it ended, once that is known: its agent may forget it."""


class AgentCalls:
    """Calls to agents over one session."""

    def __init__(self, session: aiohttp.ClientSession, secret: FleetSecret | None) -> None:
        self._session = session
        self._secret = secret
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def ask(self, instance: Instance, call: Callable[[AgentClient], Awaitable[_T]]) -> _T:
        """Return an agent's answer; raise `ApiError`."""
        try:
            async with self._turns:
                return await call(AgentClient(self._session, instance.agent_url, self._secret))
        except AgentError as error:
            raise _as_api_error(instance.id, error) from None

    async def longest(self, instance: Instance, call: LookupCall) -> tuple[Location, int] | None:
        """Return the location that holds most of a prompt, and how many tokens of it.

        The fastest one where several hold as much; None if none holds any.
        Raises `ApiError`.
        """

        async def held(tier: TierName) -> int:
            request = LookupRequest(tokens=call.tokens, cache_salt=call.cache_salt, tier=tier)
            reply = await self.ask(instance, lambda agent: agent.lookup(request))
            return reply.matched_tokens

        counts = await asyncio.gather(*map(held, TIER_OF.values()))
        # max() takes the first of equals, and they stand fastest first.
        location, tokens = max(zip(TIER_OF, counts, strict=True), key=lambda each: each[1])
        return (location, tokens) if tokens else None

    async def status(self, move: AcceptedMove) -> MoveStatus | None:
        """Return how a move goes; None if its agent does not know it. Raises `ApiError`."""

        async def status_or_none(agent: AgentClient) -> MoveStatus | None:
            try:
                return await agent.move_status(move.agent_event_id)
            except AgentRefusedError as error:
                if error.status == 404:
                    return None
                raise

        if move.final is None:
            status = await self.ask(move.destination, status_or_none)
            if status is None or status.state == "running":
                return status
            move.final = status
        return move.final


def _as_api_error(name: str, error: AgentError) -> ApiError:
    """Return what the controller's caller is told about an agent's failure."""
    text = f"{name}: {error}"[:_LONGEST_ERROR]
    if isinstance(error, AgentTimeoutError):
        return UpstreamTimeoutError(text)
    if isinstance(error, AgentRefusedError) and error.status in _REFUSALS:
        return _REFUSALS[error.status](f"{name}: {error.said}"[:_LONGEST_ERROR])
    return UpstreamFailedError(text)


def check_in_reach(source: Instance, target: Instance) -> None:
    """Raise `ConflictError` if the source's address means another machine to the target."""
    if is_loopback_url(source.agent_url) and not is_loopback_url(target.agent_url):
        raise ConflictError(
            f"{target.id}, at {target.agent_url}, cannot reach {source.id} at "
            f"{source.agent_url}, its address on this machine alone: give it an agent_url that "
            "other machines can use",
            param="old_position",
        )


def source_address(source: Instance, source_info: InstanceInfo, target: InstanceInfo) -> str:
    """Return where the target fetches the source's chunks; raise `ConflictError` if it cannot."""
    if source_info.incarnation == target.incarnation:
        return ""  # Between tiers of one replica: nothing is sent.
    if source_info.layout != target.layout:
        names = ("model", "hash_algorithm", "hash_seed", "block_tokens", "chunk_tokens")
        differing = [
            f"{name} {getattr(source_info, name)} and {getattr(target, name)}"
            for name in names
            if getattr(source_info, name) != getattr(target, name)
        ]
        why = "; ".join(differing) or "dtype, weights, parallel layout or vLLM's options"
        raise ConflictError(f"the two instances' chunks are not alike: they differ in {why}")
    if source_info.transfer_port is None:
        raise ConflictError(
            f"'{source.id}' gives no chunks away: set distributed_url in its configuration",
            param="old_position",
        )
    return transfer_address(source.agent_url, source_info.transfer_port)


def progress(move: AcceptedMove, status: MoveStatus) -> dict[str, Any]:
    """Return how a move goes, for the caller that has asked for it."""
    shown = {
        "status": status.state,
        "num_tokens": move.num_tokens,
        "arrived_tokens": status.arrived_chunks * move.chunk_tokens,
        "moved_bytes": status.moved_bytes,
    }
    return {**shown, "error": status.error} if status.error else shown
