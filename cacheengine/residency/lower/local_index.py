"""Which chunks a local tier holds, least recently used first, within its capacity."""

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice
from typing import Final

from cacheengine.residency.lower.lower_index import LowerIndex, Residence
from cacheengine.residency.lower.put_aside import PutAside
from cacheengine.tiers import GetOutcome, TierBackoff

_OPERATOR_SHARE: Final = 0.5
_MOST_PASSED: Final = 256
"""Chunks that one search for what may leave passes over."""


class TierIndex(LowerIndex):
    """Keys by recency; every chunk takes ``item_bytes`` of ``capacity_bytes``.

    A chunk counts against the capacity from before it is written until after
    it is deleted, so the tier is never over it. Of one that makes room and the
    one it makes room for, only the latter counts: they are never there at once.
    At most half of the capacity can be pinned.

    A read that fails begins a pause for its chunk alone: others may lie on a
    path that works, and the tier may read this one again later.
    """

    name = "disk"

    def __init__(self, capacity_bytes: int, item_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.item_bytes = item_bytes
        # True of few chunks at a time, hence not in _items: there are millions.
        self._items: OrderedDict[bytes, Residence] = OrderedDict()
        self._readers: dict[bytes, int] = {}
        self._condemned: set[bytes] = set()
        self._pinned: dict[bytes, None] = {}
        # What was cleared whole, until its chunks are met: being written, read or deleted.
        self._cleared: PutAside[Residence] = PutAside()
        self._cleared_pins: PutAside[None] = PutAside()
        self._to_delete: list[bytes] = []
        # Of chunks whose last read failed.
        self._backoffs: dict[bytes, TierBackoff] = {}
        self._rewriting: set[bytes] = set()
        self._replaced = 0
        self._max_items = capacity_bytes // item_bytes
        self._max_pinned = int(_OPERATOR_SHARE * self._max_items)

    def __len__(self) -> int:
        return len(self._items) + len(self._cleared)

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk is held, and may be found."""
        return self._items.get(key) is Residence.HELD and key not in self._condemned

    def can_read(self, key: bytes, now_s: float) -> bool:
        """Whether the chunk is held, and is not being left alone after a failed read."""
        backoff = self._backoffs.get(key)
        return key in self and (backoff is None or not backoff.is_on(now_s))

    @property
    def is_there(self) -> bool:
        """Whether it can hold anything."""
        return self.capacity_bytes > 0

    @property
    def used_bytes(self) -> int:
        """Bytes taken, those being written or deleted included."""
        return self._used_items * self.item_bytes

    def keys(self) -> list[bytes]:
        """Return the keys that may be found, least recent first."""
        held = [key for key, state in self._items.items() if state is Residence.HELD]
        return [key for key in held if key not in self._condemned] if self._condemned else held

    def is_known(self, key: bytes) -> bool:
        """Whether the chunk is there, on its way in, or on its way out."""
        return key in self._items or key in self._cleared

    def must_rewrite(self, key: bytes) -> bool:
        """Whether the chunk is held and its last read failed, and nothing goes on with it."""
        return key in self._backoffs and key in self and key not in self._readers

    def adopt(self, keys: list[bytes]) -> list[bytes]:
        """Take in what a scan found, oldest first; return the oldest that are too many.

        Those are being deleted: `forget` each when it is gone.
        """
        for key in keys:
            self._items[key] = Residence.HELD
        excess = max(0, len(self._items) - self._max_items)
        return self._delete(list(self._items)[:excess], Residence.DELETING)

    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk that is not known, or anew; return what must be deleted first.

        None: the capacity cannot be kept.
        """
        if self.must_rewrite(key):
            self._rewriting.add(key)
            self._items[key] = Residence.WRITING
            return []
        assert not self.is_known(key)
        excess = max(0, self._used_items + 1 - self._max_items)
        victims = self._victims(excess)
        if len(victims) < excess:
            return None
        self._items[key] = Residence.WRITING
        self._replaced += len(victims)
        return self._delete(victims, Residence.REPLACED)

    def publish(self, key: bytes) -> bool:
        """End a write that succeeded. False: it was cleared meanwhile, delete it and `forget`."""
        self._meet(key)
        assert self._items[key] is Residence.WRITING
        is_wanted = key not in self._condemned
        self._items[key] = Residence.HELD if is_wanted else Residence.DELETING
        self._rewriting.discard(key)
        self._backoffs.pop(key, None)
        return is_wanted

    def not_written(self, key: bytes) -> bool:
        """End a write that failed; what was to be replaced is still there, and may be read yet."""
        self._meet(key)
        if key not in self._rewriting:
            self.forget(key)
            return True
        self._rewriting.discard(key)
        is_wanted = key not in self._condemned
        self._items[key] = Residence.HELD if is_wanted else Residence.DELETING
        return is_wanted

    def forget(self, key: bytes) -> None:
        """Drop a chunk that is gone: deleted, lost, or never written."""
        assert key not in self._readers
        self._meet(key)
        self._replaced -= self._items.pop(key) is Residence.REPLACED
        self._condemned.discard(key)
        self._pinned.pop(key, None)
        self._backoffs.pop(key, None)

    def begin_read(self, key: bytes) -> None:
        """Keep a readable chunk while it is read, and make it the most recent."""
        assert key in self
        self._readers[key] = self._readers.get(key, 0) + 1
        self._items.move_to_end(key)

    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        """End a read. True: the chunk must be deleted now, then `forget` it."""
        self._meet(key)
        if outcome is GetOutcome.FAILED:
            # Without a pause every lookup would find it, and every read fail again.
            self._backoffs.setdefault(key, TierBackoff()).failed(now_s)
        else:
            self._backoffs.pop(key, None)
        if outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED):
            self._hide(key)
        self._readers[key] -= 1
        if self._readers[key]:
            return False
        del self._readers[key]
        if key not in self._condemned:
            return False
        if outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED):
            # It is gone: the tier removes what is damaged.
            self.forget(key)
            return False
        # Forgotten but not deleted, it would take room that is not counted.
        self._items[key] = Residence.DELETING
        return True

    def touch(self, key: bytes) -> None:
        """Make a chunk the most recent, if it is there."""
        if key in self._items:
            self._items.move_to_end(key)

    def operator_pin(self, key: bytes) -> bool:
        """Pin a readable chunk until `operator_unpin`; False when too much is pinned."""
        assert key in self
        if key not in self._pinned and len(self._pinned) >= self._max_pinned:
            return False
        self._pinned[key] = None
        return True

    def operator_unpin(self, key: bytes) -> bool:
        """End a chunk's pin; False if it has none."""
        had_one = key in self._pinned
        self._pinned.pop(key, None)
        return had_one

    def clear(self, keys: Collection[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hide these; return what was readable, and what to delete now."""
        for key in keys:
            self._meet(key)
        known = [key for key in keys if key in self._items]
        readable = [key for key in known if key in self]
        idle = []
        for key in known:
            if self._items[key] is Residence.HELD and key not in self._readers:
                idle.append(key)
            elif self._items[key] in (Residence.HELD, Residence.WRITING):
                self._hide(key)
        return readable, self._delete(idle, Residence.DELETING)

    def clear_all(self) -> None:
        """Hide everything, in one step."""
        self._cleared.add(self._items)
        self._cleared_pins.add(self._pinned)
        self._items, self._pinned = OrderedDict(), {}

    def take_cleared(self, most: int) -> tuple[list[bytes], bool]:
        """Return some of what was hidden and is idle, to delete now; and whether more is there."""
        for _ in range(most):
            if (item := self._cleared.popitem()) is None:
                break
            self._met(*item)
        taken, self._to_delete = self._to_delete[:most], self._to_delete[most:]
        return taken, bool(self._cleared or self._to_delete)

    def _meet(self, key: bytes) -> None:
        """Do for a chunk that was hidden with all others what `clear` does for one."""
        state = self._cleared.pop(key)
        if state is not None:
            self._met(key, state)

    def _met(self, key: bytes, state: Residence) -> None:
        self._cleared_pins.pop(key)
        self._items[key] = state
        if state is Residence.HELD and key not in self._readers:
            self._to_delete += self._delete([key], Residence.DELETING)
        elif state in (Residence.HELD, Residence.WRITING):
            self._hide(key)

    def limit_to_used(self) -> None:
        """Hold no more than now, until `restore_limit`: the capacity is not really there."""
        self._max_items = self._used_items

    def restore_limit(self) -> None:
        """Use the whole capacity again."""
        self._max_items = self.capacity_bytes // self.item_bytes

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert self._used_items <= self._max_items
        replaced = sum(state is Residence.REPLACED for state in self._cleared.values())
        for key, state in self._items.items():
            replaced += state is Residence.REPLACED
            if state is not Residence.HELD:
                assert key not in self._readers, "read while written or deleted"
            elif key in self._condemned:
                assert key in self._readers, "cleared, unread and still here"
        assert replaced == self._replaced
        assert all(count > 0 for count in self._readers.values())
        known = {*self._items, *self._cleared}
        assert self._readers.keys() <= known
        assert self._condemned <= known
        assert self._backoffs.keys() <= known
        assert not {*self._items} & {*self._cleared}, "both cleared and not"
        for key in self._rewriting:
            assert key in self._cleared or self._items.get(key) is Residence.WRITING
        assert all(self.is_known(key) for key in self._to_delete)
        assert all(key in self for key in self._pinned), "a pin on what cannot be found"
        assert len(self._pinned) <= self._max_pinned

    @property
    def _used_items(self) -> int:
        return len(self) - self._replaced

    def _victims(self, count: int) -> list[bytes]:
        """Return up to so many chunks that may leave, the least recent first."""
        victims: list[bytes] = []
        pinned = []
        # Few are under way at a time. Where more are passed over, a later call goes on there.
        for key, state in islice(self._items.items(), count + _MOST_PASSED):
            if len(victims) >= count:
                break
            if key in self._pinned:
                pinned.append(key)
            elif state is Residence.HELD and key not in self._readers:
                victims.append(key)
        for key in pinned:
            # Else they would gather at the front, and be passed over for every
            # chunk that comes.
            self._items.move_to_end(key)
        return victims

    def _hide(self, key: bytes) -> None:
        self._condemned.add(key)
        self._pinned.pop(key, None)

    def _delete(self, keys: list[bytes], state: Residence) -> list[bytes]:
        for key in keys:
            self._items[key] = state
            self._pinned.pop(key, None)
        return keys
