"""Keys, events and answers of LMCache's servers and coordinator (lmcache 0.5.6), as they are sent.

Sources: ``lmcache/v1/mp_coordinator/schemas.py`` and ``api.py``, and the servers'
``http_apis``. Fields that are not known are passed over, as LMCache's own servers do, so that
a later version's additions break nothing.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from router.config import join_host_port

UNKNOWN_OFFSET: Final = -1
"""``token_offset`` of a chunk whose place in its prompt is not told."""
_FORBIDDEN_IN_SALT: Final = frozenset("@/\\\x00")
_LONGEST_SALT: Final = 128
_LONGEST_NAME: Final = 1024

LmcacheTier = Literal["l1", "l2"]
"""CPU RAM of the server, and the disks and remote stores behind it."""
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=255)]
Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]


class ObjectKey(NamedTuple):
    """The key of a chunk in LMCache: one for each rank and object group."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    @property
    def leads(self) -> bool:
        """Whether it stands for its chunk: of all ranks and groups the first is followed."""
        return not self.object_group_id and not self.kv_rank >> 16 & 0xFF

    @property
    def world_size(self) -> int:
        """How many ranks share the chunk; ``kv_rank`` packs it with the rank's number."""
        return self.kv_rank >> 24 & 0xFF

    def encoded(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        fields = self._asdict()
        return {"chunk_hash_hex": fields.pop("chunk_hash").hex(), **fields}


def leading_keys(
    digests: Iterable[bytes], model: str, world_size: int, cache_salt: str
) -> list[ObjectKey]:
    """Return the keys that stand for chunks (`ObjectKey.leads`)."""
    rank = rank_of_world(world_size, 0)
    return [ObjectKey(each, model, rank, 0, cache_salt) for each in digests]


def rank_of_world(world_size: int, rank: int) -> int:
    """Return the ``kv_rank`` of one of so many ranks, all of them on one machine."""
    return world_size << 24 | rank << 16 | world_size << 8 | rank


class EncodedKey(msgspec.Struct, frozen=True, kw_only=True):
    """An `ObjectKey` as it is sent."""

    chunk_hash_hex: Annotated[str, Meta(pattern=r"\A([0-9a-fA-F]{2}){1,64}\Z")]
    model_name: Name
    kv_rank: _Count
    object_group_id: _Count = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Refuse a key that LMCache itself refuses."""
        if "@" in self.model_name:
            raise ValueError("model_name must not contain '@'")
        check_salt(self.cache_salt)

    def key(self) -> ObjectKey:
        """Return it decoded."""
        return ObjectKey(
            bytes.fromhex(self.chunk_hash_hex),
            self.model_name,
            self.kv_rank,
            self.object_group_id,
            self.cache_salt,
        )


def check_salt(cache_salt: str) -> None:
    """Raise ValueError for a salt that LMCache would refuse."""
    if len(cache_salt) > _LONGEST_SALT or _FORBIDDEN_IN_SALT & set(cache_salt):
        raise ValueError(f"cache_salt must not contain @ / \\ NUL, or exceed {_LONGEST_SALT}")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one key."""

    key: EncodedKey
    size_bytes: _Count = 0
    token_ids: list[Token] = []
    token_offset: Annotated[int, Meta(ge=UNKNOWN_OFFSET)] = UNKNOWN_OFFSET


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one kind at one server, in its order (``incarnation``, ``seq`` from 1 on)."""

    instance_id: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    incarnation: _Count
    seq: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    event_type: Literal["store", "delete", "access", "config"]
    tier: LmcacheTier
    backend: Name
    entries: list[Entry] = []
    shared: bool = False
    """Whether every server that has this backend reaches the same chunks there."""
    ts: Annotated[float, Meta(ge=0)] = 0.0
    capacity_bytes: _Count = 0
    capacity_revision: _Count = 0

    def __post_init__(self) -> None:
        """Refuse a batch that LMCache's coordinator refuses."""
        if not self.backend and self.event_type != "access":
            raise ValueError(f"backend must not be empty in {self.event_type}")
        if self.entries and self.event_type == "config":
            raise ValueError("config declares a capacity and has no entries")


class EventsCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /events``: refused whole when any of it is malformed."""

    batches: list[Batch] = []


class RegisterCall(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /instances``."""

    ip: Annotated[str, Meta(min_length=1, max_length=255)]
    http_port: Annotated[int, Meta(ge=1, le=65535)]
    instance_id: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    metadata: Annotated[dict[Name, Name], Meta(max_length=64)] = {}
    p2p_advertised_url: Name = ""
    mq_port: Annotated[int, Meta(ge=0, le=65535)] = 0

    def __post_init__(self) -> None:
        """Refuse an address that makes no URL of the server."""
        if (
            urlsplit(f"http://{join_host_port(self.ip, self.http_port)}").hostname
            != self.ip.lower()
        ):
            raise ValueError("ip must be an address or a host's name")


class CacheContext(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM process that has registered its KV cache with a server (of ``/status``)."""

    model_name: str
    world_size: int = 1


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /status`` of a server."""

    chunk_size: Annotated[int, Meta(ge=1)]
    hash_algorithm: str
    cache_context_meta: dict[str, CacheContext | None] = {}

    def worlds(self) -> dict[str, int]:
        """Return the world sizes of the models whose KV caches have been registered."""
        registered = filter(None, self.cache_context_meta.values())
        return {each.model_name: each.world_size for each in registered}


class _MpConfig(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /config`` of a server."""

    mp: _MpConfig


class PrefetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer about a prefetch: to the order, and to questions after it."""

    status: Literal["submitted", "noop", "pending", "completed"]
    request_id: str = ""
    chunks: _Count = 0
    found_keys: _Count = 0
    """Keys in L1 at the end, counted from the prompt's first chunk on."""
    total_keys: _Count = 0

    def chunks_found(self, asked: int) -> int:
        """Return how many of the chunks asked for are in L1: each has a key for each rank."""
        return self.found_keys // max(1, self.total_keys // asked)


class DeletedTold(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer to ``DELETE /cache/objects``: keys deleted, and keys that were locked."""

    deleted: _Count = 0
    skipped: _Count = 0
    error: str = ""
    """Why L2 deleted none."""


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /instances`` of a coordinator."""

    instances: list[RegisterCall] = []


class PlacementTold(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator knows a key to be."""

    instance_id: str
    tier: LmcacheTier
    backend: str
    incarnation: _Count = 0
    size_bytes: _Count = 0
    shared: bool = False


class KeyTold(msgspec.Struct, frozen=True, kw_only=True):
    """A key, and where a coordinator knows it to be."""

    key: EncodedKey
    placements: list[PlacementTold] = []


class LookedUp(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``POST /directory/lookup``."""

    results: list[KeyTold] = []
