"""Which chunks a lower tier holds, least recently used first, within its capacity.

Pure bookkeeping: no I/O, no clock, no threads. It decides; someone else
writes, reads and deletes, and reports back.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice


class Residence(Enum):
    """The life of a chunk in the tier. Only HELD ones can be found."""

    WRITING = auto()
    HELD = auto()
    DELETING = auto()
    REPLACED = auto()
    """Being deleted to make room for one that is WRITING and waits for it."""


@dataclass(slots=True, eq=False)
class _Item:
    state: Residence
    readers: int = 0
    condemned: bool = False


class TierIndex:
    """Keys by recency; every chunk takes ``item_bytes`` of ``capacity_bytes``.

    A chunk counts against the capacity from before it is written until after
    it is deleted, so the tier is never over it. Of one that makes room and the
    one it makes room for, only the latter counts: they are never there at once.
    """

    def __init__(self, capacity_bytes: int, item_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.item_bytes = item_bytes
        self._items: OrderedDict[bytes, _Item] = OrderedDict()
        self._replaced = 0
        self._max_items = capacity_bytes // item_bytes

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk can be read."""
        item = self._items.get(key)
        return item is not None and item.state is Residence.HELD and not item.condemned

    @property
    def used_bytes(self) -> int:
        """Bytes taken, those being written or deleted included."""
        return self._used_items * self.item_bytes

    def keys(self) -> list[bytes]:
        """Return the keys that can be read, least recent first."""
        return [key for key in self._items if key in self]

    def is_known(self, key: bytes) -> bool:
        """Whether the chunk is there, on its way in, or on its way out."""
        return key in self._items

    def adopt(self, keys: list[bytes]) -> list[bytes]:
        """Take in what a scan found, oldest first; return the oldest that are too many.

        Those are being deleted: `forget` each when it is gone.
        """
        for key in keys:
            self._items[key] = _Item(Residence.HELD)
        excess = max(0, len(self._items) - self._max_items)
        return self._delete(list(self._items)[:excess], Residence.DELETING)

    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk that is not known; return what must be deleted first.

        Returns None, changing nothing, when the capacity cannot be kept.
        `forget` the deleted ones, then `publish` or `forget` the chunk.
        """
        assert key not in self._items
        excess = max(0, self._used_items + 1 - self._max_items)
        idle = (
            candidate
            for candidate, item in self._items.items()
            if item.state is Residence.HELD and item.readers == 0
        )
        victims = list(islice(idle, excess))
        if len(victims) < excess:
            return None
        self._items[key] = _Item(Residence.WRITING)
        self._replaced += len(victims)
        return self._delete(victims, Residence.REPLACED)

    def publish(self, key: bytes) -> bool:
        """End a write that succeeded. False: it was cleared meanwhile, delete it and `forget`."""
        item = self._items[key]
        assert item.state is Residence.WRITING
        item.state = Residence.DELETING if item.condemned else Residence.HELD
        return item.state is Residence.HELD

    def forget(self, key: bytes) -> None:
        """Drop a chunk that is gone: deleted, lost, or never written."""
        item = self._items.pop(key)
        assert item.readers == 0
        self._replaced -= item.state is Residence.REPLACED

    def begin_read(self, key: bytes) -> None:
        """Keep a readable chunk while it is read, and make it the most recent."""
        assert key in self
        self._items[key].readers += 1
        self._items.move_to_end(key)

    def end_read(self, key: bytes, *, intact: bool) -> bool:
        """End a read. True: the last reader of a chunk cleared or lost meanwhile.

        Then it is on its way out: delete it unless it is gone, and `forget` it.
        """
        item = self._items[key]
        item.readers -= 1
        item.condemned = item.condemned or not intact
        if item.condemned and item.readers == 0:
            item.state = Residence.DELETING
            return True
        return False

    def touch(self, key: bytes) -> None:
        """Make a chunk the most recent, if it is there."""
        if key in self._items:
            self._items.move_to_end(key)

    def clear(self) -> tuple[list[bytes], list[bytes]]:
        """Hide everything. Return the keys that were readable, and those to delete now.

        What is being read or written is deleted by whoever ends that
        (`end_read`, `publish`).
        """
        readable = self.keys()
        idle = []
        for key, item in self._items.items():
            item.condemned = True
            if item.state is Residence.HELD and item.readers == 0:
                idle.append(key)
        return readable, self._delete(idle, Residence.DELETING)

    def limit_to_used(self) -> None:
        """Hold no more than now, until `restore_limit`: the capacity is not really there."""
        self._max_items = self._used_items

    def restore_limit(self) -> None:
        """Use the whole capacity again."""
        self._max_items = self.capacity_bytes // self.item_bytes

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert self._used_items <= self._max_items
        replaced = 0
        for item in self._items.values():
            replaced += item.state is Residence.REPLACED
            assert item.readers >= 0
            if item.state is not Residence.HELD:
                assert item.readers == 0, "read while written or deleted"
            elif item.condemned:
                assert item.readers > 0, "cleared, unread and still here"
        assert replaced == self._replaced

    @property
    def _used_items(self) -> int:
        return len(self._items) - self._replaced

    def _delete(self, keys: list[bytes], state: Residence) -> list[bytes]:
        for key in keys:
            self._items[key].state = state
        return keys
