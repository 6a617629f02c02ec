"""Keys: made here, shown by callers, kept only as their SHA-256.

A password needs a slow hash, since people choose among few. A key is 256 random bits: nothing
tries them all, so a fast hash hides it as well, and costs a request no time.
"""

import hashlib
import secrets
from collections.abc import Iterator
from typing import Final

from aiohttp import web

from warmroute_common.http_server import is_anthropic

_PREFIX: Final = "wr-"
"""By which scanners find a key that was committed somewhere."""
_KEY_BYTES: Final = 32


def new_key() -> str:
    """Return a key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def sha256_of(key: str) -> str:
    """Return what the configuration knows a key by."""
    # Headers that are no UTF-8 have surrogates in them.
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def shown_keys(request: web.Request) -> Iterator[str]:
    """Yield the keys that a caller shows: a bearer token, and ``x-api-key`` as Anthropic's do."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield token.strip()
    if is_anthropic(request.path) and (key := request.headers.get("X-Api-Key")) is not None:
        yield key.strip()
