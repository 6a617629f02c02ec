"""Asking instances' agents on behalf of the controller's callers.

Not more than so many calls at once, each with an end; what goes wrong becomes
the `ApiError` that the caller gets, with the instance's name in it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import aiohttp

from cacheengine.wire import LookupRequest, TierName
from router.config import (
    ApiError,
    BadRequest,
    Conflict,
    Overloaded,
    TooLarge,
    UpstreamFailed,
    UpstreamTimeout,
)
from router.controller.calls import TIER_OF, Location, LookupCall
from router.controller.registry import Instance
from router.staging import AgentClient, AgentError, AgentRefused, AgentTimeout

MAX_CALLS: Final = 64
"""Calls to agents at once; more wait for their turn."""
_LONGEST_ERROR: Final = 500
_REFUSALS: Final[dict[int, type[ApiError]]] = {
    400: BadRequest,
    409: Conflict,
    413: TooLarge,
    503: Overloaded,
}
"""Refusals of an agent's that concern the caller, and are told in the agent's own words."""

_T = TypeVar("_T")


class AgentCalls:
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


def _as_api_error(name: str, error: AgentError) -> ApiError:
    """Return what the controller's caller is told about an agent's failure."""
    text = f"{name}: {error}"[:_LONGEST_ERROR]
    if isinstance(error, AgentTimeout):
        return UpstreamTimeout(text)
    if isinstance(error, AgentRefused) and error.status in _REFUSALS:
        return _REFUSALS[error.status](f"{name}: {error.said}"[:_LONGEST_ERROR])
    return UpstreamFailed(text)
