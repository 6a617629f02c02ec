"""Which chunks a local tier holds, within its capacity. Pure."""

from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

from cacheengine.residency.eviction_policies import DEFAULT_POLICY, make_policy
from cacheengine.residency.lower_index import Activity, LowerIndex
from cacheengine.tiers.tier import GetOutcome, tier_backoff
from warmroute_common.backoff import Backoff

_OPERATOR_SHARE: Final = 0.5
_LOOKED_AT: Final = 64
"""Chunks among which one of the same path is looked for."""
_CLEARED: Final = -1
"""The generation of a chunk that was cleared alone: never the current one."""


class LocalIndex(LowerIndex):
    """All chunks of a local tier; each takes ``item_bytes`` of ``capacity_bytes``.

    A chunk counts against the capacity from before it is written until after it is deleted, so
    the tier never exceeds it. Of a chunk that makes room and the one that it makes room for only
    the latter counts: they are never there at the same time. At most half of the capacity can be
    pinned.

    Clearing is one step: the index gets a new generation, and chunks of an older one are hidden.
    Chunks that are pinned, read or rewritten are set aside in the eviction policy.

    A read that fails begins a pause for its chunk alone: others may lie on a path that works, and
    the tier may be able to read this one later.
    """

    name = "disk"

    def __init__(
        self,
        capacity_bytes: int,
        item_bytes: int,
        *,
        policy: str = DEFAULT_POLICY,
        paths: int = 1,
        path_of: Callable[[bytes], int] | None = None,
    ) -> None:
        """``policy`` is one of `POLICY_NAMES`; ``path_of``: see `LocalTier.path_of`."""
        self.queues = [self.name, *(f"{self.name}-{number}" for number in range(1, paths))]
        self._path_of = path_of if paths > 1 else None
        self.capacity_bytes = capacity_bytes
        self.item_bytes = item_bytes
        self._max_items = capacity_bytes // item_bytes
        self._max_pinned = int(_OPERATOR_SHARE * self._max_items)
        # Every chunk that takes room, and the index's generation when it came.
        self._items: dict[bytes, int] = {}
        self._generation = 0
        self._policy = make_policy(policy, self._max_items)
        self._busy: dict[bytes, Activity] = {}
        self._rewriting: set[bytes] = set()
        # Being deleted to make room for chunks that are being written.
        self._replaced: set[bytes] = set()
        self._pinned: set[bytes] = set()
        # Of chunks whose last read failed.
        self._backoffs: dict[bytes, Backoff] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_there(self) -> bool:
        return self.capacity_bytes > 0

    @property
    def used_bytes(self) -> int:
        """Those being written or deleted count, too."""
        return self._used_items * self.item_bytes

    @property
    def _used_items(self) -> int:
        return len(self._items) - len(self._replaced)

    def queue_of(self, key: bytes) -> str:
        """Return the queue of the path that a chunk belongs to."""
        return self.queues[self._path_of(key) if self._path_of else 0]

    # --- lookups ---

    def __contains__(self, key: bytes) -> bool:
        is_held = self._busy.get(key, Activity.READING) is Activity.READING
        return is_held and self._items.get(key) == self._generation

    def can_read(self, key: bytes, now_s: float) -> bool:
        backoff = self._backoffs.get(key)
        if self.is_closed or (backoff is not None and backoff.is_on(now_s)):
            return False
        return key in self and not (self.hanging and self.queue_of(key) in self.hanging)

    def keys(self) -> list[bytes]:
        """Return the keys that can be found: those set aside, then the next to leave first."""
        return [key for key in self._policy.order() if key in self]

    def order(self) -> list[bytes]:
        """Return the keys in that order, and chunks among them that are cleared. Fast."""
        return [*self._policy.order()]

    def is_known(self, key: bytes) -> bool:
        return key in self._items

    def must_rewrite(self, key: bytes) -> bool:
        """Whether the chunk is held, its last read failed, and nothing is under way with it."""
        return key in self._backoffs and key in self and key not in self._busy

    def touch(self, key: bytes) -> None:
        if key in self:
            self._policy.touch(key)

    # --- writes, reads, deletes ---

    def adopt(self, keys: list[bytes]) -> list[bytes]:
        """Take in the chunks of a scan, oldest first; return the oldest that are too many.

        Those are being deleted: `forget` each when it is gone.
        """
        for key in keys:
            self._items[key] = self._generation
            self._policy.add(key)
        excess = keys[: max(0, len(self._items) - self._max_items)]
        for key in excess:
            self._begin_delete(key)
        return excess

    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk; return those to delete first. None: the capacity is too small."""
        if self.must_rewrite(key):
            self._rewriting.add(key)
            self._policy.set_aside(key)
            self._busy[key] = Activity.WRITING
            return []
        assert not self.is_known(key)
        excess = max(0, self._used_items + 1 - self._max_items)
        victims = self._victims(excess, self.queue_of(key))
        if len(victims) < excess:
            return None
        for victim in victims:
            self._policy.evict(victim)
            self._begin_delete(victim)
        self._replaced.update(victims)
        self._items[key] = self._generation
        self._busy[key] = Activity.WRITING
        return victims

    def _victims(self, count: int, queue: str) -> list[bytes]:
        """Return chunks to evict, of the same path if there are some among the next to leave.

        Otherwise writing to one path would wait for deletes on another.
        """
        if count and self._path_of:
            near = islice(self._policy.candidates(), _LOOKED_AT + count)
            own = [*islice((key for key in near if self.queue_of(key) == queue), count)]
            if len(own) == count:
                return own
        return [*islice(self._policy.candidates(), count)]

    def publish(self, key: bytes) -> bool:
        self._backoffs.pop(key, None)
        return self._end_write(key)

    def not_written(self, key: bytes) -> bool:
        """End a write that failed. A chunk that was to be replaced is still there."""
        if key in self._rewriting:
            return self._end_write(key)
        self.forget(key)
        return True

    def _end_write(self, key: bytes) -> bool:
        assert self._busy.pop(key) is Activity.WRITING
        self._rewriting.discard(key)
        if self._items[key] != self._generation:
            self._begin_delete(key)
            return False
        if key in self._policy:
            self._put_back(key)
        else:
            self._policy.add(key)
        return True

    def begin_read(self, key: bytes) -> None:
        assert key in self and key not in self._busy
        self._busy[key] = Activity.READING
        self._policy.set_aside(key)
        self._policy.touch(key)

    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        assert self._busy.pop(key) is Activity.READING
        if outcome is GetOutcome.FAILED:
            # Without a pause every lookup would find it, and every read fail again.
            self._backoffs.setdefault(key, tier_backoff()).failed(now_s)
        else:
            self._backoffs.pop(key, None)
        if outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED):
            # It is gone: the tier removes a damaged chunk.
            self._begin_delete(key)
            self.forget(key)
            return False
        if self._items[key] != self._generation:
            # Forgotten but not deleted, it would take room that is not counted.
            self._begin_delete(key)
            return True
        self._put_back(key)
        return False

    def forget(self, key: bytes) -> None:
        """Drop a chunk that is gone: deleted, or never written."""
        assert self._busy.pop(key) is not Activity.READING
        del self._items[key]
        self._replaced.discard(key)
        self._backoffs.pop(key, None)

    def _put_back(self, key: bytes) -> None:
        if key not in self._pinned:
            self._policy.put_back(key)

    def _begin_delete(self, key: bytes) -> None:
        self._busy[key] = Activity.DELETING
        self._pinned.discard(key)
        if key in self._policy:
            self._policy.remove(key)

    # --- clearing ---

    def hide(self, keys: Collection[bytes]) -> list[bytes]:
        known = [key for key in dict.fromkeys(keys) if key in self._items]
        for key in known:
            self._items[key] = _CLEARED
            self._pinned.discard(key)
        return self.take_hidden(known)

    def hide_all(self) -> None:
        self._generation += 1
        self._pinned = set()

    def take_hidden(self, keys: Collection[bytes]) -> list[bytes]:
        hidden = []
        for key in keys:  # one may come twice: it was cleared, put again and cleared again
            is_hidden = self._items.get(key, self._generation) != self._generation
            if is_hidden and key not in self._busy:
                self._begin_delete(key)
                hidden.append(key)
        return hidden

    # --- operators' pins, limits ---

    def operator_pin(self, key: bytes) -> bool:
        assert key in self
        if key not in self._pinned and len(self._pinned) >= self._max_pinned:
            return False
        self._pinned.add(key)
        self._policy.set_aside(key)
        return True

    def operator_unpin(self, key: bytes) -> bool:
        """End a chunk's pin; it is the most recent then. False if it has none."""
        if key not in self._pinned:
            return False
        self._pinned.remove(key)
        self._policy.touch(key)
        if key not in self._busy:
            self._policy.put_back(key)
        return True

    def limit_to_used(self) -> None:
        self._max_items = self._used_items

    def restore_limit(self) -> None:
        self._max_items = self.capacity_bytes // self.item_bytes

    def check(self) -> None:
        assert self._used_items <= self._max_items
        for few in (self._busy, self._backoffs):
            assert few.keys() <= self._items.keys()
        for key in self._rewriting:
            assert self._busy[key] is Activity.WRITING
        for key in self._replaced:
            assert self._busy[key] is Activity.DELETING
        for key in self._pinned:
            assert self._items[key] == self._generation, "a pin on a chunk that was cleared"
        assert len(self._pinned) <= self._max_pinned
        order = [*self._policy.order()]
        lying = self._items.keys() - {
            key
            for key, activity in self._busy.items()
            if activity is not Activity.READING and key not in self._rewriting
        }
        assert len(order) == len(self._policy) and {*order} == lying
        for key in self._policy.candidates():
            assert key not in self._busy and key not in self._pinned, "in use, and may be evicted"
        for key, generation in self._items.items():
            if generation == _CLEARED:
                assert key in self._busy, "cleared alone, idle and still here"
