"""Access control: client keys, and admin keys.

`Access.guard` is the middleware that admits or refuses each request. The `Grant` of a client's key
is attached to its requests; the proxy asks it once the model and the prompt are known.
"""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.api.grant import Grant
from router.config.settings import AccessConfig
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.api_errors import UnauthorizedError
from warmroute_common.http_server import is_anthropic

_KEY_PREFIX: Final = "wr-"
"""Lets secret scanners find keys that were committed by mistake."""
_KEY_BYTES: Final = 32

_METRICS: Final = "/metrics"
_REPLICAS: Final = "/replicas"
_HEALTH: Final = "/health"
_USAGE: Final = "/usage"
"""For an admin key, or a client key that asks about itself."""
_ADMIN: Final = frozenset({"/explain", "/scaling", "/ui/state", "/waste", _METRICS, _REPLICAS})
_BELOW_ADMIN: Final = (f"{_REPLICAS}/", "/requests/")
"""Prefixes of paths that need an admin key too."""


# --- keys


def new_key() -> str:
    """Return a new random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def sha256_of(key: str) -> str:
    """Return the hash by which the configuration knows a key.

    A fast hash is enough: a key is 256 random bits, which nobody can try out.
    """
    # Headers that are not UTF-8 contain surrogates.
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def shown_keys(request: web.Request) -> Iterator[str]:
    """Yield the keys in a request: the bearer token, and Anthropic's ``x-api-key``."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield token.strip()
    if is_anthropic(request.path) and (key := request.headers.get("X-Api-Key")) is not None:
        yield key.strip()


# --- the middleware

GRANT: Final = web.RequestKey("grant", Grant)
"""The grant of a request's key; missing where no keys are configured."""
IS_TENANT: Final = web.RequestKey("is_tenant", bool)
"""Whether a client may not see where its request went, and what is held there."""
IS_ADMITTED: Final = web.RequestKey("is_admitted", bool)
"""Present once `Access.guard` has admitted a request."""


class Access:
    """Admits requests. All paths but administration, health and the page need a client key.

    Keys are found by their SHA-256 in a dict. Its timing may reveal something about digests, but a
    caller cannot choose digests, nor get from a digest to a key.
    """

    def __init__(
        self,
        config: AccessConfig,
        *,
        open_paths: Collection[str] = (),
        admin_token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        utc_clock: Callable[[], float] = time.time,
    ) -> None:
        """``open_paths`` need no key, like health. ``admin_token`` counts as an admin key.

        ``utc_clock`` returns the seconds since 1970, for days and expiry dates.
        """
        self.refused: Counter[tuple[str, str]] = Counter()
        """Refused requests by key name ("none" for an unknown one) and cause."""
        self._open = frozenset({_HEALTH, *open_paths})
        self._local = frozenset() if admin_token is None else frozenset({sha256_of(admin_token)})
        self._clock = clock
        self._utc_clock = utc_clock
        self._grants: dict[str, Grant] = {}
        """By the SHA-256 of a key; a key that is being replaced has two."""
        self.change(config)

    def change(self, config: AccessConfig) -> None:
        """Use other keys from now on; requests that were admitted continue."""
        before = {each.name: each for each in self._grants.values()}
        self._grants = {}
        shared: dict[str, Any] = {
            "owns_cache": config.cache == "per-key",
            "routers": config.routers,
        }
        for each in config.keys:
            # By name: a key that was replaced keeps what it has used.
            if (grant := before.get(each.name)) is None:
                grant = Grant(each, self.refused, utc_clock=self._utc_clock, **shared)
            else:
                grant.change(each, **shared)
            for sha256 in (each.sha256, each.second_sha256):
                if sha256 is not None:
                    self._grants[sha256] = grant
        self._admins = frozenset(config.admin_sha256)
        self._are_admins = self._admins | self._local
        self._metrics_are_open = config.metrics == "open"

    @property
    def has_admin_keys(self) -> bool:
        """Whether admin keys are configured."""
        return bool(self._admins)

    def is_admin_key(self, key: str) -> bool:
        """Whether a key is an admin key, or the token of this machine's commands."""
        return sha256_of(key) in self._are_admins

    def may_administer(self, request: web.Request) -> bool:
        """Whether a request has an admin key. Where it comes from never counts."""
        shown = (*shown_keys(request), *request.headers.getall(ADMIN_HEADER, ()))
        return any(map(self.is_admin_key, shown))

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit a request; raise `UnauthorizedError`, `ForbiddenError` or `RateLimitedError`."""
        grant = self._admit(request)
        request[IS_ADMITTED] = True
        if grant is None:
            return await handler(request)
        try:
            return await handler(request)
        finally:
            grant.end_request()

    async def show_limits(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add its key's limits to an answer, if there are any; for `on_response_prepare`."""
        if (grant := request.get(GRANT)) is not None:
            anthropic = is_anthropic(request.path)
            response.headers.update(grant.limit_headers(self._clock(), anthropic=anthropic))

    def limits(self, grant: Grant | None = None) -> list[dict[str, Any]]:
        """Return the limits of all keys, or of one, and what is left of them, for JSON."""
        grants = dict.fromkeys(self._grants.values()) if grant is None else (grant,)
        return [each.shown(self._clock()) for each in grants]

    def _admit(self, request: web.Request) -> Grant | None:
        """Return the grant that counts the request, until its `Grant.end_request`."""
        # Decoded as the routing table decodes it, with %2F not a slash: so no second spelling of a
        # path leads to a handler of administration, and no path of the page to a replica.
        path = request.rel_url.path_safe
        asks_about_all = path == _USAGE and (not self._grants or self.may_administer(request))
        if asks_about_all or path in _ADMIN or path.startswith(_BELOW_ADMIN):
            self._check_admin(request)
        elif self._grants and path not in self._open:
            request[GRANT] = grant = self._grant_of(request)
            request[IS_TENANT] = not self.may_administer(request)
            if path == _USAGE:  # also where a limit is used up
                grant.check_expiry()
                return None
            grant.take_request(self._clock())
            return grant
        return None

    def _check_admin(self, request: web.Request) -> None:
        if self.may_administer(request):
            return
        if request.path == _METRICS and self._metrics_are_open:
            return
        self.refused["none", "admin"] += 1
        path = request.rel_url.raw_path
        fix = ""
        if not self._admins:
            fix = (
                "; none is configured: 'warmroute key --admin' makes one, and the user who runs "
                "the router may send the token in the file that its log names"
            )
        if request.path == _METRICS:
            fix += "; or set 'access: {metrics: open}'"
        raise UnauthorizedError(
            f"{path} asks for an admin key: 'Authorization: Bearer KEY'{fix}",
            code="invalid_api_key",
        )

    def _grant_of(self, request: web.Request) -> Grant:
        keys = list(shown_keys(request))
        for key in keys:
            if (grant := self._grants.get(sha256_of(key))) is not None:
                return grant
        self.refused["none", "key"] += 1
        found = "no valid client key was sent; send one as 'Authorization: Bearer KEY'"
        if any(map(self.is_admin_key, keys)):
            found = "an admin key was sent, and this path needs a client key (access.keys)"
        raise UnauthorizedError(found, code="invalid_api_key")
