"""What LMCache's servers and clients send to their coordinator (lmcache 0.5.6).

Sources: ``lmcache/v1/mp_coordinator/schemas.py`` and ``api.py``. Unknown fields are ignored, as in
LMCache itself, so that additions of later versions break nothing.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Meta

from router.index.lmcache_keys import lmcache_chain
from warmroute_common.addresses import join_host_port
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import ApiError, BadRequestError
from warmroute_common.decoding import decode_json
from warmroute_common.http_server import read_body

_FORBIDDEN_IN_SALT: Final = frozenset("@/\\\x00")
_LONGEST_SALT: Final = 128
_LONGEST_NAME: Final = 1024
_MAX_KEYS: Final = 100_000
_RANK_0: Final = ~0x00FF_00FF
"""The bits of a ``kv_rank`` that are not the rank's (`kv_rank`)."""

LmcacheTier = Literal["l1", "l2"]
"""l1: CPU RAM of the server; l2: its disks and remote stores."""
_Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_WorldSize = Annotated[int, Meta(ge=1, le=255)]
_Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]
_T = TypeVar("_T", bound=msgspec.Struct)


class MalformedCallError(ApiError):
    """A body that LMCache's coordinator would not accept (422)."""

    status = 422


class ObjectKey(NamedTuple):
    """LMCache's key of a chunk; a chunk has one key per rank and object group."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    @property
    def is_leading(self) -> bool:
        """Whether this is rank 0 of group 0: the key that the router follows for its chunk."""
        return not self.object_group_id and not self.kv_rank >> 16 & 0xFF

    def leading(self) -> "ObjectKey":
        """Return the key of rank 0 and group 0 of the same chunk."""
        return self._replace(kv_rank=self.kv_rank & _RANK_0, object_group_id=0)

    @property
    def world_size(self) -> int:
        """How many ranks share the chunk; ``kv_rank`` contains it."""
        return self.kv_rank >> 24 & 0xFF

    def encoded(self) -> dict[str, Any]:
        """Return the key in LMCache's JSON form."""
        fields = self._asdict()
        return {"chunk_hash_hex": fields.pop("chunk_hash").hex(), **fields}


def leading_keys(
    digests: Iterable[bytes], model: str, world_size: int, cache_salt: str
) -> list[ObjectKey]:
    """Return the leading key of each chunk."""
    rank = kv_rank(world_size, 0)
    return [ObjectKey(each, model, rank, 0, cache_salt) for each in digests]


def kv_rank(world_size: int, rank: int) -> int:
    """Return LMCache's ``kv_rank`` of one of ``world_size`` ranks on one machine."""
    return world_size << 24 | rank << 16 | world_size << 8 | rank


class EncodedKey(msgspec.Struct, frozen=True, kw_only=True):
    """An `ObjectKey` in LMCache's JSON form."""

    chunk_hash_hex: Annotated[str, Meta(pattern=r"\A([0-9a-fA-F]{2}){1,64}\Z")]
    model_name: _Name
    kv_rank: _Count
    object_group_id: _Count = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if "@" in self.model_name:
            raise ValueError("model_name must not contain '@'")
        _check_salt(self.cache_salt)

    def key(self) -> ObjectKey:
        return ObjectKey(
            bytes.fromhex(self.chunk_hash_hex),
            self.model_name,
            self.kv_rank,
            self.object_group_id,
            self.cache_salt,
        )


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) > _LONGEST_SALT or _FORBIDDEN_IN_SALT & set(cache_salt):
        raise ValueError(f"cache_salt must not contain @ / \\ NUL, or exceed {_LONGEST_SALT}")


class ServerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /instances``."""

    ip: Annotated[str, Meta(min_length=1, max_length=255)]
    http_port: Annotated[int, Meta(ge=1, le=65535)]
    instance_id: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    metadata: Annotated[dict[_Name, _Name], Meta(max_length=64)] = {}
    p2p_advertised_url: _Name = ""
    mq_port: Annotated[int, Meta(ge=0, le=65535)] = 0

    def __post_init__(self) -> None:
        if (
            urlsplit(f"http://{join_host_port(self.ip, self.http_port)}").hostname
            != self.ip.lower()
        ):
            raise ValueError("ip must be an address or a host's name")


class ServerEventEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one key."""

    key: EncodedKey
    size_bytes: _Count = 0


class ServerEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one kind at one server; ``seq`` counts from 1 in each ``incarnation``."""

    instance_id: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    incarnation: _Count
    seq: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    event_type: Literal["store", "delete", "access", "config"]
    tier: LmcacheTier
    backend: _Name
    entries: list[ServerEventEntry] = []
    shared: bool = False
    """Whether all servers with this backend reach the same chunks in it."""
    ts: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if not self.backend and self.event_type != "access":
            raise ValueError(f"backend must not be empty in {self.event_type}")
        if self.entries and self.event_type == "config":
            raise ValueError("config declares a capacity and has no entries")


class EventsCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /events``: the whole call is refused if any part of it is malformed."""

    batches: list[ServerEventBatch] = []


class ServerPrefetchCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /cache/prefetches``: a server, and a prompt from its first token."""

    instance_id: str
    model_name: _Name
    world_size: _WorldSize
    token_ids: list[_Token] = []
    cache_salt: str = ""

    def __post_init__(self) -> None:
        _check_salt(self.cache_salt)


class DirectoryLookupCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /directory/lookup``: keys, or a prompt from its first token."""

    keys: list[EncodedKey] = []
    token_ids: list[_Token] = []
    model_name: _Name = ""
    world_size: _WorldSize = 1
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if bool(self.keys) == bool(self.token_ids):
            raise ValueError("supply exactly one of 'keys' or 'token_ids'")
        if self.token_ids and not self.model_name:
            raise ValueError("'model_name' is required with 'token_ids'")
        _check_salt(self.cache_salt)


async def read_call(request: web.Request, kind: type[_T]) -> _T:
    """Return a request's body as a ``kind``; raise `MalformedCallError`."""
    body = await read_body(request)
    try:
        return decode_json(body, kind)
    except UNREADABLE as error:
        raise MalformedCallError(f"{request.path}: {error}") from None


def prompt_keys(call: DirectoryLookupCall, chunk_tokens: int) -> tuple[int, list[ObjectKey]]:
    """Return how many chunks the call's prompt has, and the keys of group 0 for all its ranks.

    Raises `BadRequestError` for too many keys.
    """
    world_size = call.world_size
    check_count(len(call.token_ids) // chunk_tokens * world_size)
    chain = lmcache_chain(call.token_ids, chunk_tokens)
    ranks = [kv_rank(world_size, rank) for rank in range(world_size)]
    name, salt = call.model_name, call.cache_salt
    return len(chain), [ObjectKey(each, name, rank, 0, salt) for each in chain for rank in ranks]


def check_count(keys: int) -> None:
    """Raise `BadRequestError` for more keys than one call may look up."""
    if keys > _MAX_KEYS:
        raise BadRequestError(
            f"this call looks up {keys} keys; the limit is {_MAX_KEYS}: split it into several calls"
        )
