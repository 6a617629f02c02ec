"""Which slot of the CPU pool holds which chunk.

Pure bookkeeping: no I/O, no clock, no threads. The caller serializes calls
and passes the time in.
"""

from collections.abc import Collection, Container, Iterable, Iterator
from itertools import islice
from typing import Final

from cacheengine.residency.deadlines import Deadlines
from cacheengine.residency.entry import UNUSED, Entry, Holder, State, check_entry
from cacheengine.residency.eviction import make_policy
from cacheengine.residency.shards import Shards
from cacheengine.wire import MAX_PINNED_SHARE

_OPERATOR_SHARE: Final = 0.5
_MOST_KEPT: Final = 256
"""Entries that are passed over by one search for what may leave."""


class CpuIndex:
    """Entries by key, free slots, and the eviction of unused ones.

    Pins are bounded, so that stores find room: operators' to half of the
    slots, all together (`may_pin`) to three quarters.
    """

    def __init__(self, num_slots: int, policy: str) -> None:
        """``policy`` is one of `POLICY_NAMES`."""
        self.num_slots = num_slots
        # Popped from the end: low slots first, which makes tests readable.
        self._free = list(range(num_slots - 1, -1, -1))
        self._ready: Shards[Entry] = Shards()
        # Those whose bytes are not whole, or that were cleared in use: few.
        self._others: dict[bytes, Entry] = {}
        # Holds the ready entries that are not pinned by an operator: these
        # would gather at its front, and be passed over by every eviction.
        self._policy = make_policy(policy, num_slots)
        self._pinned: dict[bytes, Entry] = {}  # also entries to be pinned when ready
        self._deadlines = Deadlines()
        self._operator_pinned: set[bytes] = set()
        self._max_operator_pinned = int(_OPERATOR_SHARE * num_slots)
        self._max_pinned = max(1, int(MAX_PINNED_SHARE * num_slots))

    def __len__(self) -> int:
        return self.num_slots - len(self._free)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._others.values()
        yield from self._ready

    def __contains__(self, key: bytes) -> bool:
        """Whether the bytes of a key may be used."""
        return self.ready(key) is not None

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of a key, condemned or not."""
        return self._ready.of(key).get(key) or self._others.get(key)

    def ready(self, key: bytes) -> Entry | None:
        """Return the entry of a key if its bytes may be used."""
        return self._ready.of(key).get(key)

    def ready_keys(self) -> list[bytes]:
        """Return the keys whose bytes may be used; not for where there are many."""
        return [entry.key for entry in self._ready]

    def listed(self, shard: int) -> tuple[list[tuple[bytes, Entry]], int]:
        """Return some of the entries whose bytes may be used, as `Shards.listed` does."""
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

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of those keys that are ready."""
        for key in keys:
            if self.ready(key) is not None and key not in self._operator_pinned:
                self._policy.touch(key)

    def tidy(self, entry: Entry) -> None:
        """Have an entry that nothing keeps any more considered for eviction again.

        Saves the memory of a `Use` that says nothing.
        """
        use = entry.use
        if use is None or use.holds or use.putting or use.leases or use.operator_pinned:
            return
        self._policy.resume(entry.key)
        if use == UNUSED:
            entry.use = None

    # --- pins ---

    def may_pin(self, entry: Entry | None) -> bool:
        """Whether an entry (None: one to come) has a pin or may get one."""
        if entry is not None and self.has_pin(entry.key):
            return True
        return self.pins_left > 0

    def has_pin(self, key: bytes) -> bool:
        """Whether an entry has a pin that is not an operator's."""
        return key in self._pinned

    @property
    def pins_left(self) -> int:
        """How many entries more may get one."""
        return self._max_pinned - len(self._pinned) - len(self._operator_pinned)

    def pin(self, entry: Entry, pin_s: float, now_s: float, holder: Holder = None) -> None:
        """Keep an entry from eviction for so long from now, or from when its bytes are there.

        A holder's pin that was to last longer does. Other holders' are not changed.
        """
        lease_s = pin_s if entry.state is not State.READY else now_s + pin_s
        leases = {**entry.seen.leases}
        leases[holder] = max(lease_s, leases.get(holder, lease_s))
        self._pinned[entry.key] = entry
        self._keep_leases(entry, leases)

    def unpin(self, entry: Entry) -> None:
        """End all holders' pins of an entry; an operator's stays."""
        self._keep_leases(entry, {})

    def end_pin(self, entry: Entry, holder: Holder) -> None:
        """End one holder's pin, if it has one."""
        leases = entry.seen.leases
        if holder in leases:
            self._keep_leases(entry, {each: leases[each] for each in leases if each != holder})

    def end_expired(self, entry: Entry, now_s: float) -> int:
        """End the pins of a ready entry whose deadline has passed; return how many."""
        leases = entry.seen.leases
        kept = {holder: until_s for holder, until_s in leases.items() if until_s > now_s}
        self._keep_leases(entry, kept)
        return len(leases) - len(kept)

    def _keep_leases(self, entry: Entry, leases: dict[Holder, float]) -> None:
        if entry.key not in self._pinned:
            self.tidy(entry)
            return
        use = entry.in_use
        use.leases = leases
        is_ready = use.state is State.READY
        use.pinned_until_s = max(leases.values(), default=None) if is_ready else None
        self._deadlines.note(entry, min(leases.values(), default=None) if is_ready else None)
        if not leases:
            del self._pinned[entry.key]
        self.tidy(entry)

    def expired_pins(self, now_s: float, most: int | None = None) -> list[Entry]:
        """Return entries, at most so many, with a pin that has run out and is still there.

        The first to run out comes first, of those of one call the first that was pinned.
        """
        return list(islice(self._deadlines.past(now_s), most))

    def operator_pin(self, key: bytes) -> bool:
        """Pin a ready entry until `operator_unpin`; False when too much is pinned so."""
        entry = self._ready.of(key)[key]
        if key in self._operator_pinned:
            return True
        if len(self._operator_pinned) >= self._max_operator_pinned:
            return False
        self._operator_pinned.add(key)
        self._policy.remove(key)
        entry.in_use.operator_pinned = True
        return True

    def operator_unpin(self, key: bytes) -> bool:
        """End an operator's pin, as if the chunk had just come; False if there is none."""
        if key not in self._operator_pinned:
            return False
        entry = self._ready.of(key)[key]
        self._operator_pinned.remove(key)
        self._policy.add(key)
        entry.in_use.operator_pinned = False
        self.tidy(entry)
        return True

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        slots = [entry.slot for entry in self]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot lost or shared"
        ready, pinned, by_operator = set(), set(), set()
        for entry in self:
            key = entry.key
            assert self.get(key) is entry and entry.is_usable == (self.ready(key) is entry)
            check_entry(entry)
            if entry.is_usable:
                ready.add(key)
            if entry.seen.leases:
                pinned.add(key)
            if entry.seen.operator_pinned:
                by_operator.add(key)
        order = list(self._policy.order())
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
