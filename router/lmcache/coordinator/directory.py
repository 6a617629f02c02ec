"""Which LMCache server holds which keys, in which tier and backend. Pure.

What its stock coordinator's key directory knows, learned from the same events. Every change of
what an owner holds of a key in one of the router's tiers comes out as a `Change`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from router.lmcache.wire import Batch, Entry, LmcacheTier, ObjectKey
from router.residency import Tier

_SHARED: Final = "\0"
"""Begins the owner of a backend that several servers reach; no server's id has it."""

_LOCAL_BACKENDS: Final = frozenset(
    {"fs", "fs_native", "raw_block", "dax", "hf3fs", "nixl_store", "nixl_store_dynamic", "mock"}
)
"""L2 backends on disks; of others, and unknown ones, the slowest is supposed."""

_MAX_TOKEN_BYTES: Final = 256 << 20
_TOKEN_BYTES: Final = 4


class Place(NamedTuple):
    """Where bytes of a key lie."""

    owner: str
    """The server's id; for a shared backend that one's (`owner_of`)."""
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
    """Return who holds what a batch tells of: its server, or the backend if that is shared."""
    return shared_owner(batch.backend) if batch.shared else batch.instance_id


@dataclass(frozen=True, slots=True)
class Held:
    """What was told of a key at a place."""

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
    """All that is known of a key."""

    places: dict[Place, Held] = field(default_factory=dict)
    tokens: bytes = b""
    """Its chunk's token ids, four bytes each; empty where they were not told."""
    access_count: int = 0

    def tiers(self, owner: str) -> set[Tier]:
        """Return the tiers that an owner holds it in."""
        return {_tier(at, held) for at, held in self.places.items() if at.owner == owner}


def _tier(place: Place, held: Held) -> Tier:
    if place.tier == "l1":
        # Uncertain CPU RAM is treated as disk: it is asked for before it is used.
        return Tier.CPU if held.certain else Tier.DISK
    is_local = not place.shared and place.backend in _LOCAL_BACKENDS
    return Tier.DISK if is_local else Tier.REMOTE


class Directory:
    """The keys of all servers, at most ``max_keys``; of more, those go that were used first."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.evicted = 0
        self._records: OrderedDict[ObjectKey, Record] = OrderedDict()
        self._of_owner: dict[str, dict[ObjectKey, None]] = {}
        self._used: dict[Place, int] = {}
        self._token_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: ObjectKey) -> Record:
        """Return what is known of a key, an empty record if nothing."""
        return self._records.get(key, _NOTHING)

    def used(self) -> dict[Place, int]:
        """Return the bytes at each place that holds any."""
        return dict(self._used)

    def held_by(self, owner: str) -> Iterator[tuple[ObjectKey, set[Tier]]]:
        """Return an owner's keys with the tiers that hold them."""
        for key in self._of_owner.get(owner, ()):
            yield key, self._records[key].tiers(owner)

    def apply(self, batch: Batch) -> list[Change]:
        """Take over a batch that is in order; return what it changes."""
        changes: list[Change] = []
        for entry in batch.entries:
            self._apply(batch, entry, changes)
        while len(self._records) > self.max_keys:
            self._evict(changes)
        return changes

    def fence(self, instance_id: str) -> list[Change]:
        """Forget a server's L1: its process has ended. What lies in L2 outlives it."""
        return self._each_l1(instance_id, lambda held: None)

    def doubt(self, instance_id: str) -> list[Change]:
        """Note that deletions from a server's L1 may have been missed."""
        return self._each_l1(instance_id, lambda held: replace(held, certain=False))

    def confirm(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[Change]:
        """Note that a server was asked for keys and has them in L1."""
        changes: list[Change] = []
        for key in keys:
            record = self._records.get(key)
            if record is None:
                record = self._records[key] = Record()
            place = self._l1_place(record, instance_id)
            known = record.places.get(place)
            held = replace(known, certain=True) if known else Held(instance_id, 0, 0)
            self._set(key, record, place, held, changes)
        while len(self._records) > self.max_keys:
            self._evict(changes)
        return changes

    def replace(self, key: ObjectKey, told: Mapping[Place, Held]) -> list[Change]:
        """Take over all that another directory knows of a key."""
        changes: list[Change] = []
        record = self._records.get(key)
        if record is None:
            if not told:
                return []
            record = self._records[key] = Record()
        gone = [place for place in record.places if place not in told]
        # What is new first: a record without a place would leave.
        for place, held in told.items():
            self._set(key, record, place, held, changes)
        for place in gone:
            self._set(key, record, place, None, changes)
        while len(self._records) > self.max_keys:
            self._evict(changes)
        return changes

    def refute(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[Change]:
        """Forget of these keys what was uncertain at a server: it was asked, and has them not."""
        changes: list[Change] = []
        for key in keys:
            record = self._records.get(key, _NOTHING)
            for place, held in list(record.places.items()):
                if place.owner == instance_id and not held.certain:
                    self._set(key, record, place, None, changes)
        return changes

    def check(self) -> None:
        """Raise AssertionError if the directory contradicts itself."""
        assert len(self._records) <= self.max_keys
        used: dict[Place, int] = {}
        owners: dict[str, set[ObjectKey]] = {}
        for key, record in self._records.items():
            assert record.places, key
            for place, held in record.places.items():
                used[place] = used.get(place, 0) + held.size_bytes
                owners.setdefault(place.owner, set()).add(key)
        assert {place: count for place, count in used.items() if count} == self._used
        assert owners == {owner: set(keys) for owner, keys in self._of_owner.items() if keys}
        assert self._token_bytes == sum(len(each.tokens) for each in self._records.values())

    # --- parts of the above

    def _apply(self, batch: Batch, entry: Entry, changes: list[Change]) -> None:
        key, owner = entry.key.key(), owner_of(batch)
        record = self._records.get(key)
        place = Place(owner, batch.tier, batch.backend)
        if batch.event_type == "delete":
            if record is not None and place in record.places:
                self._set(key, record, place, None, changes)
            return
        size_bytes = entry.size_bytes
        if batch.event_type == "access":
            # It says that the key is there. Of L1 it names no backend: there is mostly one.
            if batch.tier == "l1":
                place = self._l1_place(record, owner)
            known = record and record.places.get(place)
            size_bytes = known.size_bytes if known else 0
        if record is None:
            record = self._records[key] = Record()
        if batch.event_type == "access":
            record.access_count += 1
            self._records.move_to_end(key)
        self._keep_tokens(record, entry)
        held = Held(batch.instance_id, batch.incarnation, size_bytes)
        self._set(key, record, place, held, changes)

    @staticmethod
    def _l1_place(record: Record | None, owner: str) -> Place:
        places = record.places if record else ()
        known = (each for each in places if each.owner == owner and each.tier == "l1")
        return next(known, Place(owner, "l1", "dram"))

    def _keep_tokens(self, record: Record, entry: Entry) -> None:
        count = len(entry.token_ids) * _TOKEN_BYTES
        if count and not record.tokens and self._token_bytes + count <= _MAX_TOKEN_BYTES:
            record.tokens = array("I", entry.token_ids).tobytes()
            self._token_bytes += count

    def _each_l1(self, owner: str, change: "_Changed") -> list[Change]:
        changes: list[Change] = []
        for key in list(self._of_owner.get(owner, ())):
            record = self._records[key]
            l1 = [each for each in record.places if each.owner == owner and each.tier == "l1"]
            for place in l1:
                self._set(key, record, place, change(record.places[place]), changes)
        return changes

    def _set(
        self,
        key: ObjectKey,
        record: Record,
        place: Place,
        held: Held | None,
        changes: list[Change],
    ) -> None:
        """Note what is at a place, None for nothing: the one way in which a record changes."""
        owner, before = place.owner, record.tiers(place.owner)
        old = record.places.pop(place, None)
        if held is not None:
            record.places[place] = held
        grown = (held.size_bytes if held else 0) - (old.size_bytes if old else 0)
        if grown:
            self._used[place] = self._used.get(place, 0) + grown
            if not self._used[place]:
                del self._used[place]
        after = record.tiers(owner)
        if after:
            self._of_owner.setdefault(owner, {})[key] = None
        else:
            self._of_owner.get(owner, {}).pop(key, None)
        changes += _differences(owner, key, before, after)
        if not record.places:
            del self._records[key]
            self._token_bytes -= len(record.tokens)

    def _evict(self, changes: list[Change]) -> None:
        key, record = next(iter(self._records.items()))
        self.evicted += 1
        for place in list(record.places):
            self._set(key, record, place, None, changes)


class _Changed(Protocol):
    """What becomes of what is held at a place."""

    def __call__(self, held: Held, /) -> Held | None: ...


_NOTHING: Final = Record()


def _differences(
    owner: str, key: ObjectKey, before: Iterable[Tier], after: Iterable[Tier]
) -> Sequence[Change]:
    old, new = set(before), set(after)
    gained = [Change(owner, tier, True, key) for tier in new - old]
    return gained + [Change(owner, tier, False, key) for tier in old - new]
