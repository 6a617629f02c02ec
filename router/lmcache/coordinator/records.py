"""A key of LMCache's as the directory knows it, and the router's tiers that hold it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from router.index import Tier
from router.lmcache.wire import Batch, LmcacheTier, ObjectKey

_SHARED: Final = "\0"
"""Begins the owner of a backend that several servers reach; no server's id has it."""

_LOCAL_BACKENDS: Final = frozenset(
    {"fs", "fs_native", "raw_block", "dax", "hf3fs", "nixl_store", "nixl_store_dynamic", "mock"}
)
"""L2 backends on disks; any other, an unknown one too, counts as the slowest tier."""


class Place(NamedTuple):
    """Where bytes of a key lie."""

    owner: str
    """The id of the server, or of the backend if that is shared (`owner_of`)."""
    tier: LmcacheTier
    backend: str

    @property
    def shared(self) -> bool:
        """Whether several servers reach it."""
        return self.owner.startswith(_SHARED)


def shared_owner(backend: str) -> str:
    """Return the owner of a backend that several servers reach."""
    return _SHARED + backend


def owner_of(batch: Batch) -> str:
    """Return the holder of a batch's entries: its server, or the backend if that is shared."""
    return shared_owner(batch.backend) if batch.shared else batch.instance_id


@dataclass(frozen=True, slots=True)
class Held:
    """A key at a place, as an event told of it."""

    instance_id: str
    incarnation: int
    size_bytes: int
    certain: bool = True
    """False where a deletion may have been missed."""


class Change(NamedTuple):
    """An owner gained or lost a key in a tier."""

    owner: str
    tier: Tier
    stored: bool
    key: ObjectKey


@dataclass(slots=True)
class Record:
    """The places of a key, and its use."""

    places: dict[Place, Held] = field(default_factory=dict)
    access_count: int = 0

    def tiers(self, owner: str) -> set[Tier]:
        """Return the tiers that an owner holds it in."""
        return {_tier(at, held) for at, held in self.places.items() if at.owner == owner}


@dataclass(slots=True)
class Total:
    """How much lies at a place."""

    keys: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Chunk:
    """A chunk's tokens, four bytes each, and how many keys it is kept under."""

    tokens: bytes = b""
    keys: int = 0


def _tier(place: Place, held: Held) -> Tier:
    if place.tier == "l1":
        # Uncertain CPU RAM is treated as disk: it is asked for before it is used.
        return Tier.CPU if held.certain else Tier.DISK
    is_local = not place.shared and place.backend in _LOCAL_BACKENDS
    return Tier.DISK if is_local else Tier.REMOTE


def differences(
    owner: str, key: ObjectKey, before: Iterable[Tier], after: Iterable[Tier]
) -> Sequence[Change]:
    """Return the changes from some tiers to others."""
    old, new = set(before), set(after)
    gained = [Change(owner, tier, True, key) for tier in new - old]
    return gained + [Change(owner, tier, False, key) for tier in old - new]
