"""What calls of LMCache's coordinator carry (lmcache 0.5.6, ``mp_coordinator/schemas.py``)."""

from base64 import b64decode
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from router.index import lmcache_chain
from router.lmcache.wire import (
    EncodedKey,
    Name,
    ObjectKey,
    Token,
    WorldSize,
    check_salt,
    rank_of_world,
)
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import ApiError, BadRequestError
from warmroute_common.http_server import read_body

GIB: Final = 1 << 30
_MAX_KEYS: Final = 100_000
_TOKEN_BYTES: Final = 4

TierOrAll = Literal["l1", "l2", "all"]
_TIERS: Final[tuple[TierOrAll, ...]] = ("l1", "l2", "all")
_Gib = Annotated[float, Meta(ge=0, le=2**33)]
_T = TypeVar("_T", bound=msgspec.Struct)


class MalformedCallError(ApiError):
    """A body or query that is none of LMCache's (422)."""

    status = 422


class TokensCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST`` and ``DELETE /cache/pins``: a prompt, from its first token on."""

    model_name: Name
    world_size: WorldSize
    token_ids: list[Token] = []
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Refuse a salt that no key has."""
        check_salt(self.cache_salt)


class PrefetchCall(TokensCall, frozen=True, kw_only=True):
    """``POST /cache/prefetches``."""

    instance_id: str


class DeleteCall(PrefetchCall, frozen=True, kw_only=True):
    """``POST /cache/delete``; ``force`` takes locked and pinned keys too."""

    tier: TierOrAll = "all"
    force: bool = False


class LookupCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /directory/lookup``: keys, or a prompt from its first token on."""

    keys: list[EncodedKey] = []
    token_ids: list[Token] = []
    model_name: Name = ""
    world_size: WorldSize = 1
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Refuse both forms at once, and neither."""
        if bool(self.keys) == bool(self.token_ids):
            raise ValueError("supply exactly one of 'keys' or 'token_ids'")
        if self.token_ids and not self.model_name:
            raise ValueError("'model_name' is required with 'token_ids'")
        check_salt(self.cache_salt)


class BlendCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /directory/blend-lookup``: tokens of four bytes each, from anywhere in a prompt."""

    tokens_b64: str = ""
    model_name: Name = ""
    world_size: WorldSize = 1
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Refuse tokens that are none, and those of no model."""
        if len(b64decode(self.tokens_b64, validate=True)) % _TOKEN_BYTES:
            raise ValueError("'tokens_b64' has not four bytes for each token")
        if self.tokens_b64 and not self.model_name:
            raise ValueError("'model_name' is required with 'tokens_b64'")


class QuotaCall(msgspec.Struct, frozen=True, kw_only=True):
    """``PUT /quota/{cache_salt}``."""

    limit_gb: _Gib
    tier: TierOrAll = "l2"


class QuotaConfigCall(msgspec.Struct, frozen=True, kw_only=True):
    """``PUT /quota/config``: the quota of salts that have none of their own."""

    default_limit_gb: _Gib | None = None
    tier: TierOrAll = "l2"


async def read_call(request: web.Request, kind: type[_T]) -> _T:
    """Return a request's body; raise `MalformedCallError` if it is no ``kind``."""
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise MalformedCallError(f"{request.path}: {error}") from None


def keys_of(call: LookupCall | TokensCall, chunk_tokens: int) -> tuple[int, list[ObjectKey]]:
    """Return how many chunks a prompt has, and their keys; raise `BadRequestError` if too many."""
    world_size = call.world_size
    check_count(len(call.token_ids) // chunk_tokens * world_size)
    chain = lmcache_chain(call.token_ids, chunk_tokens)
    ranks = [rank_of_world(world_size, rank) for rank in range(world_size)]
    name, salt = call.model_name, call.cache_salt
    return len(chain), [ObjectKey(each, name, rank, 0, salt) for each in chain for rank in ranks]


def check_count(keys: int) -> None:
    """Raise `BadRequestError` for more keys than one call may look at."""
    if keys > _MAX_KEYS:
        raise BadRequestError(f"one call looks at {_MAX_KEYS} keys at most, these are {keys}")


def number_of(request: web.Request, name: str, default: int, least: int, most: int | None) -> int:
    """Return a number of the query; raise `MalformedCallError` for what is none, or out of range."""
    text = request.query.get(name, str(default))
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        raise MalformedCallError(
            f"{name}={text}: it must be a number from {least} to {most or 'any'}"
        )
    return number


def page_of(request: web.Request) -> slice:
    """Return the part of a listing that ``offset`` and ``limit`` of the query ask for."""
    offset = number_of(request, "offset", 0, 0, None)
    return slice(offset, offset + number_of(request, "limit", 1_000, 1, 10_000))


def tier_of(request: web.Request, default: TierOrAll) -> TierOrAll:
    """Return the tier of the query; raise `MalformedCallError` for an unknown one."""
    text = request.query.get("tier", default)
    for tier in _TIERS:
        if tier == text:
            return tier
    raise MalformedCallError(f"tier={text}: it must be one of {', '.join(_TIERS)}")
