"""Which LMCache server holds which keys, in which tier and backend. Pure.

The directory learns from the servers' events, as the directory of LMCache's coordinator does. Each
key that an owner gains or loses in one of the router's tiers is returned as a `TierChange`.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from router.index.prompt_keys import KvTier
from router.lmcache.coordinator_protocol import (
    LmcacheTier,
    ObjectKey,
    ServerEventBatch,
    ServerEventEntry,
)

_MAX_TOKEN_BYTES: Final = 256 << 20
_TOKEN_BYTES: Final = 4
_MAX_GROUPS: Final = 16
"""Object groups; keys of further groups are not found by their chunk's tokens."""
_SHARED: Final = "\0"
"""First character of a shared backend's owner name; no server's id contains it."""
LOCAL_BACKENDS: Final = frozenset(
    {"fs", "fs_native", "raw_block", "dax", "hf3fs", "nixl_store", "nixl_store_dynamic", "mock"}
)
"""L2 backends on local disks; any other backend, also an unknown one, counts as remote."""


class KeyLocation(NamedTuple):
    """A backend that holds a key's bytes."""

    owner: str
    """The server's id, or the name of a shared backend (`owner_of`)."""
    tier: LmcacheTier
    backend: str

    @property
    def is_shared(self) -> bool:
        """Whether several servers reach it."""
        return is_shared(self.owner)


def owner_of(batch: ServerEventBatch) -> str:
    """Return the owner of a batch's keys: its server, or its backend if that is shared."""
    return _SHARED + batch.backend if batch.shared else batch.instance_id


def is_shared(owner: str) -> bool:
    """Whether an owner is a backend that several servers reach."""
    return owner.startswith(_SHARED)


def backend_of(owner: str) -> str:
    """Return the name of a shared backend, from its owner name."""
    return owner.removeprefix(_SHARED)


@dataclass(frozen=True, slots=True)
class KeyCopy:
    """A key's bytes at one location, as an event reported them."""

    instance_id: str
    incarnation: int
    size_bytes: int
    is_certain: bool = True
    """False if a deletion may have been missed."""


class TierChange(NamedTuple):
    """An owner gained or lost a key in a tier."""

    owner: str
    tier: KvTier
    stored: bool
    key: ObjectKey


@dataclass(slots=True)
class KeyRecord:
    """A key's copies, and how often it was read."""

    copies: dict[KeyLocation, KeyCopy] = field(default_factory=dict)
    access_count: int = 0

    def tiers(self, owner: str) -> set[KvTier]:
        """Return the tiers in which an owner holds the key."""
        return {_tier(at, copy) for at, copy in self.copies.items() if at.owner == owner}


@dataclass(slots=True)
class _Chunk:
    """A chunk's tokens, four bytes each, and how many keys it has."""

    tokens: bytes = b""
    keys: int = 0


class KeyDirectory:
    """The keys of all servers; above ``max_keys`` the least recently used are forgotten."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self._records: OrderedDict[ObjectKey, KeyRecord] = OrderedDict()
        self._of_owner: dict[str, dict[ObjectKey, None]] = {}
        self._groups: set[int] = set()
        self._chunks: dict[bytes, _Chunk] = {}
        self._token_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: ObjectKey) -> KeyRecord:
        """Return a key's record, an empty one if the key is unknown."""
        return self._records.get(key, _UNKNOWN)

    def token_ids(self, chunk_hash: bytes) -> list[int]:
        """Return a chunk's tokens, or [] if they were not reported."""
        chunk = self._chunks.get(chunk_hash)
        return array("I", chunk.tokens if chunk else b"").tolist()

    def in_all_groups(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Return keys of object group 0, each with the known keys of its chunk in other groups."""
        found = []
        for key in keys:
            others = (key._replace(object_group_id=each) for each in sorted(self._groups))
            found += [key, *(each for each in others if each in self._records)]
        return found

    def held_by(self, owner: str) -> Iterator[TierChange]:
        """Return an owner's keys in each tier, as if they were stored now."""
        for key in self._of_owner.get(owner, ()):
            for tier in self._records[key].tiers(owner):
                yield TierChange(owner, tier, True, key)

    def apply(self, batch: ServerEventBatch) -> list[TierChange]:
        """Apply a batch, which must be in order; return its changes."""
        changes: list[TierChange] = []
        location = KeyLocation(owner_of(batch), batch.tier, batch.backend)
        if batch.event_type == "delete":
            for entry in batch.entries:
                key = entry.key.key()
                if location in (record := self.get(key)).copies:
                    self._set(key, record, location, None, changes)
            return changes
        for entry in batch.entries:
            self._apply(batch, entry, location, changes)
        return self._evicted(changes)

    def server_ended(self, instance_id: str) -> list[TierChange]:
        """Forget a server's L1: its process has ended. Its L2 survives."""
        return self._change_l1(instance_id, lambda copy: None)

    def events_missed(self, instance_id: str) -> list[TierChange]:
        """Mark a server's L1 as uncertain: deletions may have been missed."""
        return self._change_l1(instance_id, lambda copy: replace(copy, is_certain=False))

    def confirm(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[TierChange]:
        """Record keys that a server has said it holds in L1."""
        changes: list[TierChange] = []
        for key in keys:
            record = self._records.get(key)
            if record is None:
                record = self._new(key)
            location = self._l1_location(record, instance_id)
            known = record.copies.get(location)
            copy = replace(known, is_certain=True) if known else KeyCopy(instance_id, 0, 0)
            self._set(key, record, location, copy, changes)
        return self._evicted(changes)

    def refute(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[TierChange]:
        """Forget the uncertain copies of keys that a server has said it lacks."""
        changes: list[TierChange] = []
        for key in keys:
            record = self.get(key)
            for location, copy in list(record.copies.items()):
                if location.owner == instance_id and not copy.is_certain:
                    self._set(key, record, location, None, changes)
        return changes

    def check(self) -> None:
        """Raise AssertionError if the directory contradicts itself."""
        assert len(self._records) <= self.max_keys
        owners: dict[str, set[ObjectKey]] = {}
        for key, record in self._records.items():
            assert record.copies, key
            for location in record.copies:
                owners.setdefault(location.owner, set()).add(key)
        assert owners == {owner: set(keys) for owner, keys in self._of_owner.items()}
        assert self._token_bytes == sum(len(each.tokens) for each in self._chunks.values())
        keys = Counter(key.chunk_hash for key in self._records)
        assert keys == {digest: each.keys for digest, each in self._chunks.items()}

    # --- parts of the above

    def _apply(
        self,
        batch: ServerEventBatch,
        entry: ServerEventEntry,
        location: KeyLocation,
        changes: list[TierChange],
    ) -> None:
        key, size_bytes = entry.key.key(), entry.size_bytes
        record = self._records.get(key)
        if batch.event_type == "access":
            # An access proves that the key is there. For L1 it names no backend: usually there is
            # only one.
            if batch.tier == "l1":
                location = self._l1_location(record, location.owner)
            known = record and record.copies.get(location)
            size_bytes = known.size_bytes if known else 0
        if record is None:
            record = self._new(key)
        if batch.event_type == "access":
            record.access_count += 1
            self._records.move_to_end(key)
        self._keep_tokens(key, entry)
        copy = KeyCopy(batch.instance_id, batch.incarnation, size_bytes)
        self._set(key, record, location, copy, changes)

    @staticmethod
    def _l1_location(record: KeyRecord | None, owner: str) -> KeyLocation:
        locations = record.copies if record else ()
        known = (each for each in locations if each.owner == owner and each.tier == "l1")
        return next(known, KeyLocation(owner, "l1", "dram"))

    def _new(self, key: ObjectKey) -> KeyRecord:
        self._chunks.setdefault(key.chunk_hash, _Chunk()).keys += 1
        if key.object_group_id and len(self._groups) < _MAX_GROUPS:
            self._groups.add(key.object_group_id)
        record = self._records[key] = KeyRecord()
        return record

    def _keep_tokens(self, key: ObjectKey, entry: ServerEventEntry) -> None:
        chunk, nbytes = self._chunks[key.chunk_hash], len(entry.token_ids) * _TOKEN_BYTES
        if nbytes and not chunk.tokens and self._token_bytes + nbytes <= _MAX_TOKEN_BYTES:
            chunk.tokens = array("I", entry.token_ids).tobytes()
            self._token_bytes += nbytes

    def _change_l1(
        self, owner: str, change: Callable[[KeyCopy], KeyCopy | None]
    ) -> list[TierChange]:
        changes: list[TierChange] = []
        for key in list(self._of_owner.get(owner, ())):
            record = self._records[key]
            l1 = [each for each in record.copies if each.owner == owner and each.tier == "l1"]
            for location in l1:
                self._set(key, record, location, change(record.copies[location]), changes)
        return changes

    def _set(
        self,
        key: ObjectKey,
        record: KeyRecord,
        location: KeyLocation,
        copy: KeyCopy | None,
        changes: list[TierChange],
    ) -> None:
        """Set or remove (None) a key's copy: the only way in which a record changes."""
        owner, before = location.owner, record.tiers(location.owner)
        record.copies.pop(location, None)
        if copy is not None:
            record.copies[location] = copy
        after = record.tiers(owner)
        if after:
            self._of_owner.setdefault(owner, {})[key] = None
        elif before:
            del self._of_owner[owner][key]
            if not self._of_owner[owner]:
                del self._of_owner[owner]
        changes += _tier_changes(owner, key, before, after)
        if not record.copies:
            del self._records[key]
            chunk = self._chunks[key.chunk_hash]
            chunk.keys -= 1
            if not chunk.keys:
                del self._chunks[key.chunk_hash]
                self._token_bytes -= len(chunk.tokens)

    def _evicted(self, changes: list[TierChange]) -> list[TierChange]:
        """Evict keys above `max_keys`; return ``changes`` with those of the evicted keys."""
        while len(self._records) > self.max_keys:
            key, record = next(iter(self._records.items()))
            for location in list(record.copies):
                self._set(key, record, location, None, changes)
        return changes


def _tier(location: KeyLocation, copy: KeyCopy) -> KvTier:
    if location.tier == "l1":
        # Uncertain CPU RAM counts as disk, so that a prefetch checks it before it is used.
        return KvTier.CPU if copy.is_certain else KvTier.DISK
    is_local = not location.is_shared and location.backend in LOCAL_BACKENDS
    return KvTier.DISK if is_local else KvTier.REMOTE


def _tier_changes(
    owner: str, key: ObjectKey, before: set[KvTier], after: set[KvTier]
) -> Sequence[TierChange]:
    stored = [TierChange(owner, tier, True, key) for tier in after - before]
    return stored + [TierChange(owner, tier, False, key) for tier in before - after]


_UNKNOWN: Final = KeyRecord()
