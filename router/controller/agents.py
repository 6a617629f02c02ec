"""Asking instances' agents on behalf of the controller's callers.

Not more than so many calls at once, each with an end; what goes wrong becomes
the `ApiError` that the caller gets, with the instance's name in it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import aiohttp

from cacheengine.wire import LookupRequest, MoveStatus, TierName
from router.config import (
    ApiError,
    BadRequest,
    Conflict,
    Overloaded,
    TooLarge,
    UpstreamFailed,
    UpstreamTimeout,
)
from router.controller.calls import LOCATION_OF, Tokens
from router.controller.events import Move
from router.controller.registry import Instance
from router.staging import AgentClient, AgentError, AgentRefused, AgentTimeout

MAX_CALLS: Final = 64
"""Calls to agents at once; more wait for their turn."""
_LOWER_TIERS: Final[tuple[TierName, ...]] = ("disk", "remote")
_LONGEST_ERROR: Final = 500
_REFUSALS: Final[dict[int, type[ApiError]]] = {
    400: BadRequest,
    409: Conflict,
    413: TooLarge,
    503: Overloaded,
}
"""Refusals of an agent's that concern the caller, and are told in the agent's own words."""

_T = TypeVar("_T")


class Agents:
    """Calls to agents over one session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def ask(self, instance: Instance, call: Callable[[AgentClient], Awaitable[_T]]) -> _T:
        """Return an agent's answer; raise `ApiError`."""
        try:
            async with self._turns:
                return await call(AgentClient(self._session, instance.agent_url))
        except AgentError as error:
            raise _as_api_error(instance.id, error) from None

    async def longest(
        self, instance: Instance, tokens: Tokens, cache_salt: str | None
    ) -> tuple[str, int] | None:
        """Return the location that holds most of a prompt, and how many tokens of it.

        The fastest one where several hold as much; None if none holds any.
        Raises `ApiError`.
        """

        async def held(tier: TierName | None) -> tuple[int, Sequence[str]]:
            request = LookupRequest(tokens=tokens, cache_salt=cache_salt, tier=tier)
            reply = await self.ask(instance, lambda agent: agent.lookup(request))
            return reply.matched_tokens, reply.tiers

        matched, fastest = await held(None)
        if not matched:
            return None
        # Every chunk comes from the fastest tier that has it: those from the
        # CPU up to the first that is not are all that the CPU holds in a row.
        in_cpu = next((i for i, tier in enumerate(fastest) if tier != "cpu"), len(fastest))
        if in_cpu == len(fastest):
            return LOCATION_OF["cpu"], matched
        lower = await asyncio.gather(*(held(tier) for tier in _LOWER_TIERS))
        counts = {
            LOCATION_OF["cpu"]: matched * in_cpu // len(fastest),
            **{LOCATION_OF[tier]: n for tier, (n, _) in zip(_LOWER_TIERS, lower, strict=True)},
        }
        # max() takes the first of equals, and they stand fastest first.
        best = max(counts, key=counts.__getitem__)
        return (best, counts[best]) if counts[best] else None

    async def move_status(self, move: Move) -> MoveStatus | None:
        """Return how a move goes; None if its agent does not know it. Raises `ApiError`."""
        try:
            async with self._turns:
                client = AgentClient(self._session, move.agent_url)
                return await client.move_status(move.agent_event_id)
        except AgentRefused as error:
            if error.status == 404:
                return None
            raise _as_api_error(move.destination, error) from None
        except AgentError as error:
            raise _as_api_error(move.destination, error) from None


def _as_api_error(name: str, error: AgentError) -> ApiError:
    """Return what the controller's caller is told about an agent's failure."""
    text = f"{name}: {error}"[:_LONGEST_ERROR]
    if isinstance(error, AgentTimeout):
        return UpstreamTimeout(text)
    if isinstance(error, AgentRefused) and error.status in _REFUSALS:
        return _REFUSALS[error.status](f"{name}: {error.said}"[:_LONGEST_ERROR])
    return UpstreamFailed(text)
