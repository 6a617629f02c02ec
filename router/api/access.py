"""Access control: client keys with their models and rates, and admin keys.

`Access.guard` is the middleware that admits or refuses each request. The `Grant` of a client's key
is attached to its requests; the proxy asks it once the model and the prompt are known.
"""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from math import ceil
from typing import Final
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler

from router.config.settings import AccessConfig, KeyConfig
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.api_errors import (
    ForbiddenError,
    RateLimitedError,
    UnauthorizedError,
)
from warmroute_common.http_server import is_anthropic

_MINUTE_S: Final = 60.0

_KEY_PREFIX: Final = "wr-"
"""Lets secret scanners find keys that were committed by mistake."""
_KEY_BYTES: Final = 32

_METRICS: Final = "/metrics"
_REPLICAS: Final = "/replicas"
_HEALTH: Final = "/health"
_ADMIN: Final = frozenset({"/explain", "/ui/state", _METRICS, _REPLICAS})
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


# --- rates


class TokenBucket:
    """A rate limit: a bucket that holds one minute's worth, starts full and refills evenly.

    A request may pass while the bucket holds at least one token, and may then take more than
    there is. The next request waits until the debt is paid. So no request is too large to pass,
    and the rate holds over time.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._capacity = float(per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._left = self._capacity
        self._filled_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next request may pass; 0 if it may pass now."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._left) / self._per_s)

    def take(self, count: int, now_s: float) -> None:
        """Take tokens out, also more than there are; a count below 0 puts some back."""
        self._fill(now_s)
        self._left = min(self._capacity, self._left - count)

    def _fill(self, now_s: float) -> None:
        self._left = min(self._capacity, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s


class Grant:
    """What one client key allows. ``refused`` counts refusals by key name and cause."""

    def __init__(
        self, key: KeyConfig, refused: Counter[tuple[str, str]], *, owns_cache: bool = False
    ) -> None:
        """``owns_cache``: the key shares no cached KV with others."""
        self._refused = refused
        self._buckets: dict[str, TokenBucket] = {}
        self.change(key, owns_cache=owns_cache)

    def change(self, key: KeyConfig, *, owns_cache: bool = False) -> None:
        """Apply a key's new settings; the bucket of an unchanged rate keeps its level."""
        self.name = key.name
        self.salt_key = key.sha256.encode() if owns_cache else None
        """The secret of which `Policy.parse` makes salts; None: clients' own salts count."""
        self._scope = quote(key.name, safe="")
        self._models = None if key.models is None else frozenset(key.models)
        before = self._buckets
        self._buckets = {}
        for unit, per_minute in (
            ("requests", key.requests_per_minute),
            ("tokens", key.tokens_per_minute),
        ):
            if per_minute is not None:
                bucket = before.get(unit)
                same = bucket is not None and bucket.per_minute == per_minute
                self._buckets[unit] = bucket if bucket and same else TokenBucket(per_minute)

    def own_session(self, session: str | None) -> str | None:
        """Return a session's name among those of all keys: ``KEY/SESSION``."""
        return None if session is None else f"{self._scope}/{session}"

    def allows(self, model: str | None) -> bool:
        """Whether the key may use a model; None leaves the choice to the replica."""
        return self._models is None or model in self._models

    def check_model(self, model: str | None) -> None:
        """Raise `ForbiddenError` for a model that the key may not use."""
        if self.allows(model):
            return
        self._refused[self.name, "model"] += 1
        found = (
            f"the key '{self.name}' is limited to certain models, and the request names none"
            if model is None
            else f"the key '{self.name}' may not use the model '{model}'"
        )
        raise ForbiddenError(
            f"{found}; GET /v1/models lists its models", param="model", code="model_not_allowed"
        )

    def take_request(self, now_s: float) -> None:
        """Count a request; raise `RateLimitedError` where requests or tokens are used up."""
        self._check("requests", now_s)
        self._check("tokens", now_s)
        self._take("requests", 1, now_s)

    def take_prompt(self, tokens: int, now_s: float) -> None:
        """Count a prompt; raise `RateLimitedError` where tokens are used up.

        It checks again because requests that arrive together all pass `take_request` before the
        first of them is read.
        """
        self._check("tokens", now_s)
        self._take("tokens", tokens, now_s)

    def take_answer(self, tokens: int, now_s: float) -> None:
        """Count an answer's tokens; below 0 where the prompt had fewer than were counted."""
        self._take("tokens", tokens, now_s)

    @property
    def limits_tokens(self) -> bool:
        """Whether the key has a limit of tokens."""
        return "tokens" in self._buckets

    def _take(self, unit: str, count: int, now_s: float) -> None:
        if unit in self._buckets:
            self._buckets[unit].take(count, now_s)

    def _check(self, unit: str, now_s: float) -> None:
        bucket = self._buckets.get(unit)
        if bucket is None or (wait_s := bucket.wait_s(now_s)) <= 0:
            return
        self._refused[self.name, unit] += 1
        raise RateLimitedError(
            f"the key '{self.name}' has used up its {unit} per minute",
            cause=f"key-{unit}",
            retry_after_s=ceil(wait_s),
        )


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
    ) -> None:
        """``open_paths`` need no key, like health. ``admin_token`` counts as an admin key."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Refused requests by key name ("none" for an unknown one) and cause."""
        self._open = frozenset({_HEALTH, *open_paths})
        self._local = frozenset() if admin_token is None else frozenset({sha256_of(admin_token)})
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        self.change(config)

    def change(self, config: AccessConfig) -> None:
        """Use other keys from now on; requests that were admitted continue."""
        before, self._grants = self._grants, {}
        owns_cache = config.cache == "per-key"
        for each in config.keys:
            grant = before.get(each.sha256)
            if grant is None:
                grant = Grant(each, self.refused, owns_cache=owns_cache)
            else:
                grant.change(each, owns_cache=owns_cache)
            self._grants[each.sha256] = grant
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
        self._admit(request)
        request[IS_ADMITTED] = True
        return await handler(request)

    def _admit(self, request: web.Request) -> None:
        # Decoded as the routing table decodes it, with %2F not a slash: so no second spelling of a
        # path leads to a handler of administration, and no path of the page to a replica.
        path = request.rel_url.path_safe
        if path in _ADMIN or path.startswith(_BELOW_ADMIN):
            self._check_admin(request)
        elif self._grants and path not in self._open:
            request[GRANT] = grant = self._grant_of(request)
            request[IS_TENANT] = not self.may_administer(request)
            grant.take_request(self._clock())

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
