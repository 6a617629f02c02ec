"""The middleware that lets requests in, by the keys that they show."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.access.grant import Grant
from router.access.keys import sha256_of, shown_keys
from router.config import AccessConfig
from warmroute_common.addresses import is_loopback
from warmroute_common.api_errors import ApiError, ForbiddenError, UnauthorizedError
from warmroute_common.fleet_secret import may_be_of_a_page

log = logging.getLogger("warmroute.access")

GRANT: Final = web.RequestKey("grant", Grant)
"""What a request's key allows; no request has one where no keys are configured."""

_METRICS: Final = "/metrics"
_REPLICAS: Final = "/replicas"
_ADMIN: Final = frozenset({"/explain", "/ui/state", _METRICS, _REPLICAS})
_BELOW_ADMIN: Final = (f"{_REPLICAS}/",)
"""How paths begin that are for administration, whatever follows."""
_HEALTH: Final = "/health"
_PROXIED: Final = ("Forwarded", "X-Forwarded-For")


class Access:
    """Lets requests in: all but administration, health and the page want a client's key.

    Keys are found by their SHA-256 in a table. The time that takes may tell of the digests, of
    which a caller cannot choose any part, nor get from them to a key.
    """

    def __init__(
        self,
        config: AccessConfig,
        *,
        open_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_paths`` want no key, as health."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Requests by key ("none" for an unknown one) and what they were refused for."""
        self._open = frozenset({_HEALTH, *open_paths})
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        self.change(config)

    def change(self, config: AccessConfig) -> None:
        """Let in by other keys from now on; requests that are in already go on."""
        before, self._grants = self._grants, {}
        for each in config.keys:
            grant = before.get(each.sha256)
            if grant is None:
                grant = Grant(each, self.refused)
            else:
                grant.change(each)
            self._grants[each.sha256] = grant
        self._admins = frozenset(config.admin_sha256)
        self._metrics_are_open = config.metrics == "open"

    @property
    def has_admin_keys(self) -> bool:
        """Whether administration wants a key."""
        return bool(self._admins)

    def is_admin_key(self, key: str) -> bool:
        """Whether a key is for administration."""
        return sha256_of(key) in self._admins

    def may_administer(self, request: web.Request) -> bool:
        """Whether a caller shows an admin key; where there is none, whether it is this machine."""
        if self._admins:
            return any(map(self.is_admin_key, shown_keys(request)))
        return _is_from_here(request)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise `UnauthorizedError`, `ForbiddenError` or `RateLimitedError` for what is not let in."""
        try:
            self._let_in(request)
        except ApiError as error:
            log.info(
                "%s %s from %s: %s", request.method, request.path, request.remote, error.message
            )
            raise
        return await handler(request)

    def _let_in(self, request: web.Request) -> None:
        # The path decides as the routes' table does, in which %2F is no slash: no two spellings
        # lead to one handler, and none that is let in as a file of the page to a replica.
        path = request.rel_url.path_safe
        if path in _ADMIN or path.startswith(_BELOW_ADMIN):
            self._check_admin(request)
        elif self._grants and path not in self._open:
            request[GRANT] = grant = self._grant_of(request)
            grant.take_request(self._clock())

    def _check_admin(self, request: web.Request) -> None:
        if self.may_administer(request):
            return
        if request.path == _METRICS and self._metrics_are_open:
            return
        self.refused["none", "admin"] += 1
        if self._admins:
            raise UnauthorizedError(
                f"{request.path} asks for an admin key: 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        mend = ", or 'access: {metrics: open}'" if request.path == _METRICS else ""
        raise ForbiddenError(
            f"{request.path} answers callers on the router's own machine alone, since no admin "
            f"key is configured; set access.admin_sha256 ('warmroute key --admin' makes it){mend}"
        )

    def _grant_of(self, request: web.Request) -> Grant:
        for key in shown_keys(request):
            if (grant := self._grants.get(sha256_of(key))) is not None:
                return grant
        self.refused["none", "key"] += 1
        problem = "no known key was sent"
        if any(map(self.is_admin_key, shown_keys(request))):
            problem = "an admin key was sent, and this path needs a client's key (access.keys)"
        raise UnauthorizedError(
            f"{problem}: the router asks for one, as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )


def _is_from_here(request: web.Request) -> bool:
    """Whether a program on this machine asks, for itself: no proxy, and no page in a browser."""
    if not request.remote or any(name in request.headers for name in _PROXIED):
        return False
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    return is_loopback(request.remote) and not may_be_of_a_page(host, origin)
