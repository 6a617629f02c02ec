"""Which requests the agent accepts: with the fleet's secret, or from programs of this machine."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from warmroute_common.api_errors import ForbiddenError, UnauthorizedError
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret, may_be_of_a_page

_OPEN: Final = frozenset({"/health", "/metrics"})
"""For probes and Prometheus: their answers reveal nothing about prompts."""


class Guard:
    """With a secret every caller must show it; without one the agent listens on loopback only.

    Web pages in a browser on this machine can reach the agent too: they are refused.
    """

    def __init__(self, secret: FleetSecret | None) -> None:
        self._secret = secret

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise `UnauthorizedError` or `ForbiddenError` for a request that is refused."""
        if request.path not in _OPEN:
            self._check(request)
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        if self._secret is None:
            # Not request.host, which invents a name if the header is missing.
            host, origin = request.headers.get("Host"), request.headers.get("Origin")
            if may_be_of_a_page(host, origin):
                raise ForbiddenError(
                    "it may come from a web page, by its Host or Origin header: name this machine "
                    f"by localhost or its address, or {HOW_TO_SET}"
                )
            return
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._secret.is_known_by(shown.strip()):
            raise UnauthorizedError(
                "this agent requires the fleet secret, as 'Authorization: Bearer SECRET'; "
                f"for routers and replicas {HOW_TO_SET}"
            )
