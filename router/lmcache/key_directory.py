"""Which LMCache server holds which chunks, in which tier and backend. Pure.

The directory learns from the servers' events, as the directory of LMCache's coordinator does, but
keeps only what placement uses: of a chunk's keys, one per rank and object group, the leading one,
and of that the 64 bits by which the index knows it. A key takes about 100 bytes, none of which the
garbage collector visits. Each key that an owner gains or loses in one of the router's tiers is
returned as a `TierChange`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from router.index.lmcache_keys import lmcache_key64
from router.index.prompt_keys import KvTier
from router.lmcache.coordinator_protocol import LmcacheTier, ObjectKey, ServerEventBatch

_SHARED: Final = "\0"
"""First character of a shared backend's owner name; no server's id contains it."""
LOCAL_BACKENDS: Final = frozenset(
    {"fs", "fs_native", "raw_block", "dax", "hf3fs", "nixl_store", "nixl_store_dynamic", "mock"}
)
"""L2 backends on local disks; any other backend, also an unknown one, counts as remote."""
_UNCERTAIN: Final = 1
"""Bit of a key whose deletion from L1 may have been missed."""
_MAX_BACKENDS: Final = 16
"""Backends of an owner; what further ones hold is ignored."""
_EVICTION_SLACK: Final = 256
"""If full, this fraction of the limit is evicted at once: finding the oldest key walks over deleted
ones."""
_EVICTED_PART: Final = 8
"""At most this fraction of the keys of the largest holding goes before the next one is taken."""


def owner_of(batch: ServerEventBatch) -> str:
    """Return the owner of a batch's keys: its server, or its backend if that is shared."""
    return _SHARED + batch.backend if batch.shared else batch.instance_id


def is_shared(owner: str) -> bool:
    """Whether an owner is a backend that several servers reach."""
    return owner.startswith(_SHARED)


def backend_of(owner: str) -> str:
    """Return the name of a shared backend, from its owner name."""
    return owner.removeprefix(_SHARED)


class KeyPlacement(NamedTuple):
    """A backend that holds a chunk."""

    owner: str
    """The server's id, or the name of a shared backend (`owner_of`)."""
    tier: LmcacheTier
    backend: str


class TierChange(NamedTuple):
    """An owner gained or lost a chunk of a model in a tier."""

    owner: str
    tier: KvTier
    stored: bool
    model: str
    key: int
    """As the index knows it (`lmcache_key64`)."""


class _Family(NamedTuple):
    """The parts of a key that many keys share."""

    model: str
    kv_rank: int


@dataclass(slots=True)
class _Owner:
    """What one owner holds: keys with the bits of their copies, the least recently used first."""

    name: str
    backends: list[tuple[LmcacheTier, str]] = field(default_factory=list)
    keys: dict[_Family, dict[int, int]] = field(default_factory=dict)
    l1: int = 0
    """The bits of its backends in L1."""

    def bit(self, tier: LmcacheTier, backend: str) -> int:
        """Return the bit of copies in a backend, 0 if that is ignored."""
        if (tier, backend) not in self.backends:
            if len(self.backends) >= _MAX_BACKENDS:
                return 0
            self.backends.append((tier, backend))
            if tier == "l1":
                self.l1 |= 2 << len(self.backends) - 1
        return 2 << self.backends.index((tier, backend))

    def where(self, copies: int) -> list[tuple[LmcacheTier, str]]:
        """Return the backends that copies are in."""
        return [each for at, each in enumerate(self.backends) if copies >> at + 1 & 1]

    def tiers(self, copies: int) -> set[KvTier]:
        """Return the router's tiers that copies are in."""
        found = set[KvTier]()
        for tier, backend in self.where(copies):
            if tier == "l1":
                # Uncertain CPU RAM counts as disk, so that a prefetch checks it before it is used.
                found.add(KvTier.DISK if copies & _UNCERTAIN else KvTier.CPU)
            else:
                is_local = not is_shared(self.name) and backend in LOCAL_BACKENDS
                found.add(KvTier.DISK if is_local else KvTier.REMOTE)
        return found

    def with_l1(self, copies: int) -> int:
        """Return copies, of which one in L1 is certain. Events and answers need not name it."""
        return (copies if copies & self.l1 else copies | self.bit("l1", "dram")) & ~_UNCERTAIN

    def without(self, copies: int, bits: int) -> int:
        """Return the copies that are left."""
        left = copies & ~bits
        return left if left & self.l1 else left & ~_UNCERTAIN


class KeyDirectory:
    """The keys of all owners; above ``max_keys`` the least recently used are forgotten.

    A key counts once for each owner. ``evicted`` counts the forgotten ones.
    """

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.evicted = 0
        self._owners: dict[str, _Owner] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def placements(self, key: ObjectKey) -> list[KeyPlacement]:
        """Return where the chunk of a key is."""
        family, key64 = _packed(key.leading())
        return [
            KeyPlacement(each.name, tier, backend)
            for each in self._owners.values()
            for tier, backend in each.where(each.keys.get(family, {}).get(key64, 0))
        ]

    def held_by(self, name: str) -> Iterator[TierChange]:
        """Return an owner's keys in each tier, as if they were stored now."""
        if (owner := self._owners.get(name)) is not None:
            for family, keys in owner.keys.items():
                for key in reversed(keys):  # as they follow each other in prompts
                    for tier in owner.tiers(keys[key]):
                        yield TierChange(name, tier, True, family.model, key)

    def apply(self, batch: ServerEventBatch) -> list[TierChange]:
        """Apply a batch, which must be in order; return its changes."""
        owner = self._owner(owner_of(batch))
        changes: list[TierChange] = []
        told = (entry.key.key() for entry in batch.entries)
        packed = [_packed(each) for each in told if each.is_leading]
        is_l1, kind = batch.tier == "l1", batch.event_type
        bit = 0 if is_l1 and kind == "access" else owner.bit(batch.tier, batch.backend)
        for family, key in packed:
            copies = owner.keys.get(family, {}).get(key, 0)
            if kind == "delete":
                copies = owner.without(copies, bit)
            elif is_l1 and (bit or kind == "access"):
                copies = owner.with_l1(copies | bit)
            else:
                copies |= bit
            self._set(owner, family, key, copies, changes)
        # The last is evicted last: the beginning of a prompt.
        for family, key in reversed(packed):
            keys = owner.keys.get(family, {})
            if key in keys:
                keys[key] = keys.pop(key)
        self._tidy(owner)
        return self._evicted(changes)

    def server_ended(self, instance_id: str) -> list[TierChange]:
        """Forget a server's L1: its process has ended. Its L2 survives."""
        return self._change_l1(instance_id, lambda owner, copies: owner.without(copies, owner.l1))

    def events_missed(self, instance_id: str) -> list[TierChange]:
        """Mark a server's L1 as uncertain: deletions may have been missed."""
        return self._change_l1(instance_id, lambda owner, copies: copies | _UNCERTAIN)

    def confirm(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[TierChange]:
        """Record keys that a server has said it holds in L1."""
        owner = self._owner(instance_id)
        changes: list[TierChange] = []
        for family, key in map(_packed, keys):
            copies = owner.with_l1(owner.keys.get(family, {}).get(key, 0))
            self._set(owner, family, key, copies, changes)
        self._tidy(owner)
        return self._evicted(changes)

    def refute(self, instance_id: str, keys: Iterable[ObjectKey]) -> list[TierChange]:
        """Forget the uncertain copies of keys that a server has said it lacks."""
        owner = self._owner(instance_id)
        changes: list[TierChange] = []
        for family, key in map(_packed, keys):
            copies = owner.keys.get(family, {}).get(key, 0)
            if copies & _UNCERTAIN:
                self._set(owner, family, key, owner.without(copies, owner.l1), changes)
        self._tidy(owner)
        return changes

    def check(self) -> None:
        """Raise AssertionError if the directory contradicts itself."""
        assert self._count <= self.max_keys
        found = 0
        for name, owner in self._owners.items():
            assert name == owner.name and owner.keys
            for keys in owner.keys.values():
                assert keys and all(map(owner.tiers, keys.values()))
                assert all(each & owner.l1 for each in keys.values() if each & _UNCERTAIN)
                found += len(keys)
        assert found == self._count

    # --- parts of the above

    def _owner(self, name: str) -> _Owner:
        return self._owners.setdefault(name, _Owner(name))

    def _tidy(self, owner: _Owner) -> None:
        """Forget an owner that holds nothing."""
        owner.keys = {family: keys for family, keys in owner.keys.items() if keys}
        if not owner.keys:
            del self._owners[owner.name]

    def _change_l1(self, name: str, change: Callable[[_Owner, int], int]) -> list[TierChange]:
        owner = self._owner(name)
        changes: list[TierChange] = []
        for family, keys in owner.keys.items():
            for key in [key for key, copies in keys.items() if copies & owner.l1]:
                self._set(owner, family, key, change(owner, keys[key]), changes)
        self._tidy(owner)
        return changes

    def _set(
        self, owner: _Owner, family: _Family, key: int, copies: int, changes: list[TierChange]
    ) -> None:
        """Set a key's copies: the only way in which they change."""
        keys = owner.keys.setdefault(family, {})
        former = keys.get(key, 0)
        if copies:
            keys[key] = copies
        elif former:
            del keys[key]
        self._count += bool(copies) - bool(former)
        before, after = owner.tiers(former), owner.tiers(copies)
        for tier in before ^ after:
            changes.append(TierChange(owner.name, tier, tier in after, family.model, key))

    def _evicted(self, changes: list[TierChange]) -> list[TierChange]:
        """Evict keys above `max_keys`; return ``changes`` with those of the evicted keys."""
        if self._count <= self.max_keys:
            return changes
        target = self.max_keys - self.max_keys // _EVICTION_SLACK
        while (excess := self._count - target) > 0:
            owner, family, keys = max(
                (
                    (owner, family, keys)
                    for owner in self._owners.values()
                    for family, keys in owner.keys.items()
                ),
                key=lambda each: len(each[2]),
            )
            oldest = list(islice(keys, min(excess, 1 + len(keys) // _EVICTED_PART)))
            for key in oldest:
                self._set(owner, family, key, 0, changes)
            self.evicted += len(oldest)
            self._tidy(owner)
        return changes


def _packed(key: ObjectKey) -> tuple[_Family, int]:
    return _Family(key.model_name, key.kv_rank), lmcache_key64(key.chunk_hash, key.cache_salt)
