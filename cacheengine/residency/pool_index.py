"""Which slot of the CPU pool holds which chunk.

Pure bookkeeping: no I/O, no clock, no threads. The caller serializes calls
and passes the time in.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from itertools import islice
from typing import Final

from cacheengine.residency.cleared import GONE, Cleared
from cacheengine.residency.entry import Entry, State, check_entry
from cacheengine.residency.eviction import make_policy
from cacheengine.residency.pins import Deadlines, PinnedEntries
from cacheengine.residency.shards import Shards, TakenKeys

_MOST_KEPT: Final = 256
"""Entries that are passed over by one search for what may leave."""


class CpuIndex(PinnedEntries):
    """Entries by key, free slots, and the eviction of unused ones."""

    def __init__(self, num_slots: int, policy: str) -> None:
        """``policy`` is one of `POLICY_NAMES`."""
        self.num_slots = num_slots
        # Popped from the end: low slots first, which makes tests readable.
        self._free = list(range(num_slots - 1, -1, -1))
        super().__init__(num_slots, make_policy(policy, num_slots))
        self._cleared: deque[Cleared] = deque()
        self.emptied: list[object] = []
        """Tables of cleared pools, to be let go of where nothing waits for that."""
        self.on_hidden: Callable[[Entry], None] = lambda entry: None
        """Called with each entry of a cleared pool when it is met."""

    def __len__(self) -> int:
        return self.num_slots - len(self._free)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._others.values()
        yield from self._ready
        for cleared in self._cleared:
            yield from cleared

    def __contains__(self, key: bytes) -> bool:
        """Whether the bytes of a key may be used."""
        return self.ready(key) is not None

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of a key, condemned or not."""
        entry = self.ready(key) or self._others.get(key)
        return self.meet(key) if entry is None and self._cleared else entry

    def peek(self, key: bytes) -> Entry | None:
        """Return the same, and change nothing."""
        found = [self.ready(key) or self._others.get(key)]
        found += [cleared.peek(key) for cleared in self._cleared]
        return next(filter(None, found), None)

    def ready_keys(self) -> list[bytes]:
        """Return the keys whose bytes may be used; not for where there are many."""
        return [entry.key for entry in self._ready]

    def listed_keys(self, shard: int) -> tuple[list[bytes], int]:
        """Return some of the keys whose bytes may be used, as `Shards.listed_keys` does."""
        return self._ready.listed_keys(shard)

    def listed(self, shard: int) -> tuple[list[Entry], int]:
        """Return some of their entries, as `Shards.listed` does."""
        return self._ready.listed(shard)

    @property
    def unfinished(self) -> int:
        """How many entries hold bytes that may not be used: not whole yet, or cleared in use."""
        return len(self._others)

    def victims(self, count: int, protected: Container[bytes], now_s: float) -> list[Entry]:
        """Return up to ``count`` entries to evict, best first. Changes nothing that shows."""
        found: list[Entry] = []
        while len(found) < count:
            found, is_all = self.next_victims(count, protected, now_s)
            if is_all:
                break
        return found

    def next_victims(
        self, count: int, protected: Container[bytes], now_s: float
    ) -> tuple[list[Entry], bool]:
        """Return up to ``count`` entries to evict, best first, and whether no more can be found.

        What is in use or pinned is passed over: it keeps its place, but is not met again
        before its use ends (`tidy`), else every eviction would begin with all of it. After so
        many of these the search is cut short; the next one goes on there.
        """
        found: list[Entry] = []
        kept: list[bytes] = []
        candidates = self._policy.candidates() if count > 0 else ()
        for key in candidates:
            entry = self._ready.of(key)[key]
            if not entry.is_idle(now_s):
                kept.append(key)
                if len(kept) == _MOST_KEPT:
                    break
            elif key not in protected:
                found.append(entry)
                if len(found) == count:
                    break
        for key in kept:
            self._policy.pass_over(key)
        is_all = len(kept) < _MOST_KEPT
        if len(found) < count and is_all:
            # Passed over while they were pinned, and their pins have run out meanwhile.
            taken = {entry.key for entry in found}
            run_out = (each for each in self._deadlines.past(now_s) if each.is_idle(now_s))
            free = (each for each in run_out if not (each.key in protected or each.key in taken))
            found += islice(free, count - len(found))
        return found, is_all

    def add(self, key: bytes, state: State) -> Entry:
        """Give a key that has no entry a free slot; the caller saw to it that there is one."""
        assert self.get(key) is None
        entry = Entry(key, self._free.pop(), state)
        self._others[key] = entry
        return entry

    def publish(self, entry: Entry, now_s: float) -> None:
        """Make an entry visible: its bytes are whole."""
        assert entry.state is not State.READY and not entry.condemned
        entry.in_use.state = State.READY
        self._ready.of(entry.key)[entry.key] = self._others.pop(entry.key)
        self._policy.add(entry.key)
        leases = {holder: now_s + pin_s for holder, pin_s in entry.seen.leases.items()}
        self._keep_leases(entry, leases)

    def remove(self, entry: Entry) -> None:
        """Forget an unused entry, and free its slot."""
        assert not entry.is_busy and not entry.seen.operator_pinned
        if self._others.pop(entry.key, None) is None:
            del self._ready.of(entry.key)[entry.key]
            self._policy.evict(entry.key)
        self.unpin(entry)
        self._free.append(entry.slot)

    def condemn(self, entry: Entry) -> None:
        """Hide an entry for good; `remove` it at the end of its last use."""
        self.unpin(entry)
        self.operator_unpin(entry.key)
        if entry.state is State.READY:
            self._others[entry.key] = self._ready.of(entry.key).pop(entry.key)
            self._policy.remove(entry.key)
        entry.in_use.condemned = True

    @property
    def ready_count(self) -> int:
        """How many entries hold bytes that may be used."""
        return len(self._ready)

    def clear(self) -> list[TakenKeys]:
        """Hide all entries in one step; return the keys that could be found, in parts.

        Slots in use stay so; `meet` and `reap` free the others.
        """
        taken = [TakenKeys(part) for part in self._ready.parts]
        self._cleared.append(
            Cleared(
                [*self._ready.parts],
                taken,
                self._others,
                self._policy,
                self._pinned,
                self._deadlines,
                self._operator_pinned,
                self.emptied,
            )
        )
        self._ready, self._others, self._policy = Shards(), {}, self._policy.renewed()
        self._pinned, self._deadlines, self._operator_pinned = {}, Deadlines(), set()
        return taken

    def meet(self, key: bytes) -> Entry | None:
        """Return the entry that a key had when the pool was cleared, if it is in use yet.

        To be called for an entry at hand whose use ends: it may not know of the clear.
        """
        for cleared in self._cleared:
            entry = cleared.take(key)
            if entry is not None:
                return self._hide(entry)
        return None

    def reap(self, most: int) -> bool:
        """Free slots of what was cleared, at most so many; return whether there are more."""
        for _ in range(most):
            if not self._cleared:
                break
            entry = self._cleared[0].next()
            if entry is None:
                self.emptied.append(self._cleared.popleft())
            else:
                self._hide(entry)
        return bool(self._cleared)

    def _hide(self, entry: Entry) -> Entry | None:
        if entry.use is not None:
            if not entry.condemned:
                self.on_hidden(entry)
            use = entry.in_use
            use.leases, use.pinned_until_s, use.operator_pinned = {}, None, False
            use.condemned = True
            if entry.state is not State.READY or entry.is_busy:
                self._others[entry.key] = entry
                return entry
        entry.use = GONE
        self._free.append(entry.slot)
        return None

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of those keys that are ready."""
        for key in keys:
            if self.ready(key) is not None and key not in self._operator_pinned:
                self._policy.touch(key)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        slots = [entry.slot for entry in self]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot lost or shared"
        ready, pinned, by_operator = set(), set(), set()
        for entry in [*self._others.values(), *self._ready]:
            key = entry.key
            assert self.peek(key) == entry and entry.is_usable == (self.ready(key) is entry)
            check_entry(entry)
            if entry.is_usable:
                ready.add(key)
            if entry.seen.leases:
                pinned.add(key)
            if entry.seen.operator_pinned:
                by_operator.add(key)
        order = [*self._policy.order()]
        assert len(order) == len(self._policy) and {*order} == ready - by_operator
        assert pinned == self._pinned.keys()
        self._deadlines.check(self._pinned.values())
        self._check_passed_over(order)
        assert by_operator == self._operator_pinned <= ready
        assert len(by_operator) <= self._max_operator_pinned

    def _check_passed_over(self, order: Collection[bytes]) -> None:
        for key in set(order).difference(self._policy.candidates()):
            entry = self._ready.of(key)[key]
            assert entry.is_busy or entry.seen.leases, "never looked at again by an eviction"
