"""Which requests the agent takes: with the fleet's secret, or of this machine's own programs."""

from typing import Final

from aiohttp import web

from cacheengine.agent.answers import AgentUnauthorizedError, ForeignError, Handler
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret, may_be_of_a_page

_OPEN: Final = frozenset({"/health", "/metrics"})
"""They tell nothing of any prompt, to probes and to Prometheus."""


class Guard:
    """With a secret every caller shows it; without one only this machine's programs reach us.

    Pages in a browser on this machine reach us as well: those are told apart.
    """

    def __init__(self, secret: FleetSecret | None) -> None:
        self._secret = secret

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise `AgentUnauthorizedError` or `ForeignError` for a request that is not let in."""
        if request.path not in _OPEN:
            self._let_in(request)
        return await handler(request)

    def _let_in(self, request: web.Request) -> None:
        if self._secret is None:
            # Not request.host, which makes a name up where there is none.
            host, origin = request.headers.get("Host"), request.headers.get("Origin")
            if may_be_of_a_page(host, origin):
                raise ForeignError(
                    "it may come from a web page, by its Host or Origin header: name this machine "
                    f"by localhost or its address, or {HOW_TO_SET}"
                )
            return
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._secret.is_known_by(shown.strip()):
            raise AgentUnauthorizedError(
                "the fleet secret is asked for, as 'Authorization: Bearer SECRET'; "
                f"for routers and replicas {HOW_TO_SET}"
            )
