"""Which LMCache server holds which keys, in which tier and backend. Pure.

The directory learns the same from events as that of LMCache's coordinator. A key that an owner
gains or loses in one of the router's tiers comes out as a `Change`.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from router.index import Tier
from router.lmcache.coordinator.records import (
    Change,
    Chunk,
    Held,
    Place,
    Record,
    Total,
    differences,
    owner_of,
)
from router.lmcache.wire import Batch, Entry, ObjectKey

_MAX_TOKEN_BYTES: Final = 256 << 20
_TOKEN_BYTES: Final = 4
_MAX_GROUPS: Final = 16
"""Object groups; the keys of any others are not found by their chunk's tokens."""


class Directory:
    """The keys of all servers, at most ``max_keys``: beyond that the least recently used leave."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self._records: OrderedDict[ObjectKey, Record] = OrderedDict()
        self._of_owner: dict[str, dict[ObjectKey, None]] = {}
        self.totals: dict[tuple[Place, str], Total] = {}
        """Keys and bytes at each place, by salt; only the directory changes them."""
        self._groups: set[int] = set()
        self._chunks: dict[bytes, Chunk] = {}
        self._token_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: ObjectKey) -> Record:
        """Return what is known of a key, an empty record if nothing."""
        return self._records.get(key, _NOTHING)

    def token_ids(self, chunk_hash: bytes) -> list[int]:
        """Return a chunk's tokens, whatever model, rank or salt it is kept under; [] if unknown."""
        chunk = self._chunks.get(chunk_hash)
        return array("I", chunk.tokens if chunk else b"").tolist()

    def keys(self) -> list[ObjectKey]:
        """Return all keys, the least recently used first."""
        return list(self._records)

    def in_all_groups(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Return keys of object group 0, each with those of the same chunk in other groups."""
        found = []
        for key in keys:
            others = (key._replace(object_group_id=each) for each in sorted(self._groups))
            found += [key, *(each for each in others if each in self._records)]
        return found

    def held_by(self, owner: str) -> Iterator[tuple[ObjectKey, set[Tier]]]:
        """Return an owner's keys with the tiers that hold them."""
        for key in self._of_owner.get(owner, ()):
            yield key, self._records[key].tiers(owner)

    def apply(self, batch: Batch) -> list[Change]:
        """Take over a batch that is in order; return what it changes."""
        changes: list[Change] = []
        place = Place(owner_of(batch), batch.tier, batch.backend)
        if batch.event_type == "delete":
            return self.drop(place, (each.key.key() for each in batch.entries))
        for entry in batch.entries:
            self._apply(batch, entry, place, changes)
        return self._within_bound(changes)

    def fence(self, instance_id: str) -> list[Change]:
        """Forget a server's L1: its process has ended. What lies in L2 outlives it."""
        return self._each_l1(instance_id, lambda held: None)

    def doubt(self, instance_id: str) -> list[Change]:
        """Note that deletions from a server's L1 may have been missed."""
        return self._each_l1(instance_id, lambda held: replace(held, certain=False))

    def confirm(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[Change]:
        """Note that a server was asked for keys and holds them in L1."""
        changes: list[Change] = []
        for key in keys:
            record = self._records.get(key)
            if record is None:
                record = self._new(key)
            place = self._l1_place(record, instance_id)
            known = record.places.get(place)
            held = replace(known, certain=True) if known else Held(instance_id, 0, 0)
            self._set(key, record, place, held, changes)
        return self._within_bound(changes)

    def replace(self, key: ObjectKey, told: Mapping[Place, Held]) -> list[Change]:
        """Take over all that another directory knows of a key."""
        changes: list[Change] = []
        record = self._records.get(key)
        if record is None:
            if not told:
                return []
            record = self._new(key)
        gone = [place for place in record.places if place not in told]
        # What is new first: a record without a place would leave.
        for place, held in told.items():
            self._set(key, record, place, held, changes)
        for place in gone:
            self._set(key, record, place, None, changes)
        return self._within_bound(changes)

    def refute(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[Change]:
        """Forget the uncertain ones of these keys at a server: it was asked, and lacks them."""
        changes: list[Change] = []
        for key in keys:
            record = self._records.get(key, _NOTHING)
            for place, held in list(record.places.items()):
                if place.owner == instance_id and not held.certain:
                    self._set(key, record, place, None, changes)
        return changes

    def drop(self, place: Place, keys: Iterable[ObjectKey]) -> list[Change]:
        """Forget that keys lie at a place."""
        changes: list[Change] = []
        for key in keys:
            record = self._records.get(key, _NOTHING)
            if place in record.places:
                self._set(key, record, place, None, changes)
        return changes

    def check(self) -> None:
        """Raise AssertionError if the directory contradicts itself."""
        assert len(self._records) <= self.max_keys
        totals: dict[tuple[Place, str], Total] = {}
        owners: dict[str, set[ObjectKey]] = {}
        for key, record in self._records.items():
            assert record.places, key
            for place, held in record.places.items():
                total = totals.setdefault((place, key.cache_salt), Total())
                total.keys += 1
                total.nbytes += held.size_bytes
                owners.setdefault(place.owner, set()).add(key)
        assert totals == self.totals
        assert owners == {owner: set(keys) for owner, keys in self._of_owner.items()}
        assert self._token_bytes == sum(len(each.tokens) for each in self._chunks.values())
        keys = Counter(key.chunk_hash for key in self._records)
        assert keys == {digest: each.keys for digest, each in self._chunks.items()}

    # --- parts of the above

    def _apply(self, batch: Batch, entry: Entry, place: Place, changes: list[Change]) -> None:
        key, size_bytes = entry.key.key(), entry.size_bytes
        record = self._records.get(key)
        if batch.event_type == "access":
            # It says that the key is there. Of L1 it names no backend: there is mostly one.
            if batch.tier == "l1":
                place = self._l1_place(record, place.owner)
            known = record and record.places.get(place)
            size_bytes = known.size_bytes if known else 0
        if record is None:
            record = self._new(key)
        if batch.event_type == "access":
            record.access_count += 1
            self._records.move_to_end(key)
        self._keep_tokens(key, entry)
        held = Held(batch.instance_id, batch.incarnation, size_bytes)
        self._set(key, record, place, held, changes)

    @staticmethod
    def _l1_place(record: Record | None, owner: str) -> Place:
        places = record.places if record else ()
        known = (each for each in places if each.owner == owner and each.tier == "l1")
        return next(known, Place(owner, "l1", "dram"))

    def _new(self, key: ObjectKey) -> Record:
        self._chunks.setdefault(key.chunk_hash, Chunk()).keys += 1
        if key.object_group_id and len(self._groups) < _MAX_GROUPS:
            self._groups.add(key.object_group_id)
        record = self._records[key] = Record()
        return record

    def _keep_tokens(self, key: ObjectKey, entry: Entry) -> None:
        chunk, count = self._chunks[key.chunk_hash], len(entry.token_ids) * _TOKEN_BYTES
        if count and not chunk.tokens and self._token_bytes + count <= _MAX_TOKEN_BYTES:
            chunk.tokens = array("I", entry.token_ids).tobytes()
            self._token_bytes += count

    def _each_l1(self, owner: str, change: Callable[[Held], Held | None]) -> list[Change]:
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
        total = self.totals.setdefault((place, key.cache_salt), Total())
        total.keys += (held is not None) - (old is not None)
        total.nbytes += (held.size_bytes if held else 0) - (old.size_bytes if old else 0)
        if not total.keys:
            del self.totals[place, key.cache_salt]
        after = record.tiers(owner)
        if after:
            self._of_owner.setdefault(owner, {})[key] = None
        elif before:
            del self._of_owner[owner][key]
            if not self._of_owner[owner]:
                del self._of_owner[owner]
        changes += differences(owner, key, before, after)
        if not record.places:
            del self._records[key]
            chunk = self._chunks[key.chunk_hash]
            chunk.keys -= 1
            if not chunk.keys:
                del self._chunks[key.chunk_hash]
                self._token_bytes -= len(chunk.tokens)

    def _within_bound(self, changes: list[Change]) -> list[Change]:
        """Evict keys until no more than `max_keys` are left; return the changes with theirs."""
        while len(self._records) > self.max_keys:
            key, record = next(iter(self._records.items()))
            for place in list(record.places):
                self._set(key, record, place, None, changes)
        return changes


_NOTHING: Final = Record()
