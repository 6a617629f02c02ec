"""Pins: what keeps a chunk in the pool, and until when. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from sortedcontainers import SortedDict

from cacheengine.residency.entry import UNUSED, Entry, Holder, State
from cacheengine.residency.eviction import EvictionPolicy
from cacheengine.residency.shards import SHARDS, Shards
from warmroute_common.agent_protocol import MAX_PINNED_SHARE

_OPERATOR_SHARE: Final = 0.5


class Deadlines:
    """Ready entries by when the first of their pins ends; equal ones in the order of pinning.

    A call pins many chunks until the same moment, so there are few deadlines at a time.
    """

    def __init__(self) -> None:
        # Ordered, since those in front go first: a plain dict would be gone through from its
        # beginning, with all that has left it, each time.
        self._entries: SortedDict[float, OrderedDict[bytes, Entry]] = SortedDict()

    def note(self, entry: Entry, due_s: float | None) -> None:
        """Note when the first pin of an entry ends now; None: it has none, or is not ready."""
        use = entry.in_use
        if use.due_s == due_s:
            return
        if use.due_s is not None:
            same = self._entries[use.due_s]
            del same[entry.key]
            if not same:
                del self._entries[use.due_s]
        if due_s is not None:
            self._entries.setdefault(due_s, OrderedDict())[entry.key] = entry
        use.due_s = due_s

    def past(self, now_s: float) -> Iterator[Entry]:
        """Yield the entries with a pin that is over."""
        for due_s, entries in self._entries.items():
            if due_s > now_s:
                return
            yield from entries.values()

    def check(self, pinned: Iterable[Entry]) -> None:
        """Raise AssertionError if a pin would not be found when it is over."""
        found = [(key, due_s) for due_s, same in self._entries.items() for key in same]
        assert len(found) == len(dict(found)) and all(self._entries.values())
        ready = (entry for entry in pinned if entry.state is State.READY)
        assert dict(found) == {entry.key: min(entry.seen.leases.values()) for entry in ready}


class PinnedEntries:
    """The pool's entries by key, what keeps them, and the order of the others' eviction.

    Pins are bounded, so that stores find room: operators' to half of the slots, all together
    (`may_pin`) to three quarters.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self._ready: Shards[Entry] = Shards()
        # Entries whose bytes are not whole, or that were cleared in use: few.
        self._others: dict[bytes, Entry] = {}
        # Holds the ready entries that are not pinned by an operator: these
        # would gather at its front, and be passed over by every eviction.
        self._policy = policy
        self._pinned: dict[bytes, Entry] = {}  # also entries to be pinned when ready
        self._deadlines = Deadlines()
        self._operator_pinned: set[bytes] = set()
        self._max_operator_pinned = int(_OPERATOR_SHARE * num_slots)
        self._max_pinned = max(1, int(MAX_PINNED_SHARE * num_slots))

    def ready(self, key: bytes) -> Entry | None:
        """Return the entry of a key if its bytes may be used."""
        # As `Shards.of` does: a step's lookups come here for every chunk.
        return self._ready.parts[hash(key) % SHARDS].get(key)

    def are_ready(self, keys: Iterable[bytes]) -> list[bool]:
        """Say for each key whether its bytes may be used."""
        parts = self._ready.parts
        return [key in parts[hash(key) % SHARDS] for key in keys]

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
        return self.most_pinned - len(self._pinned)

    @property
    def most_pinned(self) -> int:
        """How many entries can have pins that are not an operator's."""
        return self._max_pinned - len(self._operator_pinned)

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
