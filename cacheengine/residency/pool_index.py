"""Which slot of the CPU pool holds which chunk, and what keeps each chunk there.

Pure bookkeeping: no I/O, no clock, no threads. The caller serializes calls and passes the time in.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Final

from sortedcontainers import SortedDict

from cacheengine.kept_pool import PoolSeals, Seal
from cacheengine.residency.eviction_policies import make_policy
from warmroute_common.agent_protocol import MAX_PINNED_SHARE

_OPERATOR_SHARE: Final = 0.5


class EntryState(Enum):
    """The life of an entry: it is filled from the GPU or from a tier, then it is ready."""

    STORING = auto()
    PROMOTING = auto()
    READY = auto()


Holder = str | None
"""The request or loan that a pin is for, whose `hold` ends it; None: a request that is still to
come (a prefetch), so that the next `hold` counts as its use."""

_NO_LEASES: Final[Mapping[Holder, float]] = MappingProxyType({})
_CLEARED: Final = -1
"""The generation of an entry that was cleared alone: never the current one."""


@dataclass(slots=True, eq=False)
class PoolEntry:
    """One chunk of the pool, and what keeps it there.

    Only `PoolIndex` changes it, except for ``is_prefetched``.
    """

    key: bytes
    slot: int
    state: EntryState
    generation: int
    """That of the pool when the entry came; another one: the entry was cleared."""
    holds: int = 0
    """Times held and not released."""
    putting: int = 0
    """Puts to lower tiers that are queued or read the bytes."""
    leases: Mapping[Holder, float] = field(default_factory=lambda: _NO_LEASES)
    """Each holder's pin: until when; while the entry is not ready, for how long after that."""
    awaited: int = 0
    """Requests still to come that share the pin of the holder None."""
    due_s: float | None = None
    """When the first pin of a ready entry ends."""
    is_operator_pinned: bool = False
    is_prefetched: bool = False
    """Promoted or copied here for a request, and not held since."""

    @property
    def is_busy(self) -> bool:
        """Whether the bytes are read, or about to be."""
        return self.holds > 0 or self.putting > 0

    def is_pinned(self, now_s: float) -> bool:
        """Whether a pin keeps a ready entry at that time."""
        return self.is_operator_pinned or any(until_s > now_s for until_s in self.leases.values())


def _request_pins(leases: Mapping[Holder, float]) -> int:
    return len(leases) - (None in leases)


class PinDeadlines:
    """Ready entries by when the first of their pins ends; equal ones in the order of pinning.

    A call pins many chunks until the same moment, so there are few deadlines at a time.
    """

    def __init__(self) -> None:
        # Ordered, since entries leave at the front: a plain dict would be searched from its
        # beginning, past everything that has left it, each time.
        self._entries: SortedDict[float, OrderedDict[bytes, PoolEntry]] = SortedDict()

    def note(self, entry: PoolEntry, due_s: float | None) -> None:
        """Note when the first pin of an entry ends; None: it has none, or is not ready."""
        if entry.due_s == due_s:
            return
        if entry.due_s is not None:
            same = self._entries[entry.due_s]
            del same[entry.key]
            if not same:
                del self._entries[entry.due_s]
        if due_s is not None:
            self._entries.setdefault(due_s, OrderedDict())[entry.key] = entry
        entry.due_s = due_s

    def first_s(self) -> float:
        """Return when the first pin ends, infinite if none does."""
        return next(iter(self._entries), inf)

    def past(self, now_s: float) -> Iterator[PoolEntry]:
        """Yield the entries with a pin whose deadline has passed."""
        for due_s, entries in self._entries.items():
            if due_s > now_s:
                return
            yield from entries.values()

    def check(self, pinned: Iterable[PoolEntry]) -> None:
        found = [(key, due_s) for due_s, same in self._entries.items() for key in same]
        assert len(found) == len(dict(found)) and all(self._entries.values())
        ready = (entry for entry in pinned if entry.state is EntryState.READY)
        assert dict(found) == {entry.key: min(entry.leases.values()) for entry in ready}


class PoolIndex:
    """Entries by key, free slots, pins, and the order in which unused entries are evicted.

    Clearing the whole pool is one step: the pool gets a new generation, and entries of an older
    one are hidden. Each keeps its slot until `remove`.

    The eviction policy knows the ready entries. Pinned ones are set aside in it until their last
    pin ends. Entries that are held or put to a lower tier are set aside when an eviction meets
    them, until that use ends. So no eviction meets an entry in use twice.

    Pins are bounded, so that stores find room: operators' pins to half of the slots, all pins
    together (`may_pin`) to three quarters.

    In a pool that is kept, a slot is sealed while it has a visible chunk (`PoolSeals`). Chunks of
    an earlier run are there from the beginning, and are being stored until they were checked.
    """

    def __init__(self, num_slots: int, policy: str, seals: PoolSeals | None = None) -> None:
        """``policy`` is one of `POLICY_NAMES`."""
        self.num_slots = num_slots
        self._entries: dict[bytes, PoolEntry] = {}
        self._policy = make_policy(policy, num_slots)
        self._generation = 0
        self._seals = seals
        self._unsealed: OrderedDict[bytes, PoolEntry] = OrderedDict()
        for slot, key, _ in seals.kept if seals is not None else ():
            self._entries[key] = PoolEntry(key, slot, EntryState.STORING, self._generation)
        self._unfinished = {*self._entries}
        taken = {entry.slot for entry in self}
        # Popped from the end: low slots first, which makes tests readable.
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        self._busy: set[bytes] = set()
        self._pinned: dict[bytes, PoolEntry] = {}  # also entries to be pinned when ready
        self._deadlines = PinDeadlines()
        self._request_pins = 0
        self._operator_pinned: set[bytes] = set()
        self._max_operator_pinned = int(_OPERATOR_SHARE * num_slots)
        self._max_pinned = max(1, int(MAX_PINNED_SHARE * num_slots))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(self._entries.values())

    def __contains__(self, key: bytes) -> bool:
        """Whether the bytes of a key may be used."""
        return self.ready(key) is not None

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # --- lookups ---

    def get(self, key: bytes) -> PoolEntry | None:
        """Return the entry of a key, hidden or not."""
        return self._entries.get(key)

    def ready(self, key: bytes) -> PoolEntry | None:
        """Return the entry of a key if its bytes may be used."""
        entry = self._entries.get(key)
        return entry if entry is not None and self.is_ready(entry) else None

    def are_ready(self, keys: Iterable[bytes]) -> list[bool]:
        """Say for each key whether its bytes may be used."""
        get, generation, ready = self._entries.get, self._generation, EntryState.READY
        return [
            (entry := get(key)) is not None
            and entry.generation == generation
            and entry.state is ready
            for key in keys
        ]

    def ready_keys(self) -> list[bytes]:
        """Return the keys whose bytes may be used. For tests: there may be many."""
        return [entry.key for entry in self if self.is_ready(entry)]

    def is_ready(self, entry: PoolEntry) -> bool:
        """Whether the bytes are whole and may be found."""
        return entry.generation == self._generation and entry.state is EntryState.READY

    def is_hidden(self, entry: PoolEntry) -> bool:
        """Whether an entry was cleared: no lookup finds it, and its slot is freed after use."""
        return entry.generation != self._generation

    def count_kept(self, now_s: float) -> int:
        """Count entries that cannot be evicted at that time: not ready, in use or pinned."""
        others = self._unfinished | self._busy | self._operator_pinned
        expired = sum(
            not entry.is_pinned(now_s) and entry.key not in others
            for entry in self._deadlines.past(now_s)
        )
        return len(self._pinned) + sum(key not in self._pinned for key in others) - expired

    # --- the life of an entry ---

    def add(self, key: bytes, state: EntryState) -> PoolEntry:
        """Give a free slot to a key that has no entry. The caller has made sure of both."""
        assert key not in self._entries
        entry = PoolEntry(key, self._free.pop(), state, self._generation)
        self._entries[key] = entry
        self._unfinished.add(key)
        return entry

    def publish(self, entry: PoolEntry, now_s: float) -> None:
        """Make an entry visible: its bytes are whole. Its pins begin."""
        assert entry.state is not EntryState.READY and not self.is_hidden(entry)
        entry.state = EntryState.READY
        self._unfinished.remove(entry.key)
        self._policy.add(entry.key)
        if self._seals is not None:
            self._seals.note_use(entry.slot)
            if not self._seals.has(entry.slot):
                self._unsealed[entry.key] = entry
        if entry.leases:
            leases = {holder: now_s + pin_s for holder, pin_s in entry.leases.items()}
            self._keep_leases(entry, leases)

    def hide(self, entry: PoolEntry) -> None:
        """Clear one entry: end its pins, and hide it until `remove`."""
        self._keep_leases(entry, {})
        self.operator_unpin(entry.key)
        if entry.state is EntryState.READY:
            self._policy.remove(entry.key)
        entry.generation = _CLEARED
        self._unseal(entry)

    def hide_all(self) -> None:
        """Clear the pool in one step: end all pins, and hide all entries until `remove`."""
        self._generation += 1
        self._pinned, self._deadlines, self._operator_pinned = {}, PinDeadlines(), set()
        self._request_pins = 0
        self._unsealed.clear()
        if self._seals is not None:
            self._seals.drop_all()

    def remove(self, entry: PoolEntry) -> None:
        """Forget an entry that is not in use, and free its slot."""
        assert not entry.is_busy
        if not self.is_hidden(entry):
            assert not entry.is_operator_pinned
            self._pinned.pop(entry.key, None)
            self._request_pins -= _request_pins(entry.leases)
            self._deadlines.note(entry, None)
        if self.is_ready(entry):
            self._policy.evict(entry.key)
        elif entry.key in self._policy:
            # Hidden together with all others: the policy learns nothing from that.
            self._policy.remove(entry.key)
        del self._entries[entry.key]
        self._unfinished.discard(entry.key)
        self._unseal(entry)
        self._free.append(entry.slot)

    # --- a pool that is kept ---

    def _unseal(self, entry: PoolEntry) -> None:
        self._unsealed.pop(entry.key, None)
        if self._seals is not None:
            self._seals.drop(entry.slot)

    def take_unsealed(self, most: int) -> list[PoolEntry]:
        """Return at most ``most`` chunks to be sealed, in the order in which they came."""
        count = min(most, len(self._unsealed))
        return [self._unsealed.popitem(last=False)[1] for _ in range(count)]

    def seal(self, entry: PoolEntry, digest: bytes) -> None:
        """Seal a chunk with the checksum of its bytes, unless it has left its slot."""
        is_there = self._entries.get(entry.key) is entry and self.is_ready(entry)
        if self._seals is not None and is_there:
            self._seals.write(Seal(entry.slot, entry.key, digest))

    # --- use, eviction ---

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of those keys that are ready."""
        for key in keys:
            entry = self.ready(key)
            if entry is not None:
                self._policy.touch(key)
                if self._seals is not None:
                    self._seals.note_use(entry.slot)

    def hold(self, entry: PoolEntry) -> None:
        entry.holds += 1
        self._busy.add(entry.key)

    def release(self, entry: PoolEntry) -> None:
        assert entry.holds > 0
        entry.holds -= 1
        self._put_back_if_unused(entry)

    def begin_put(self, entry: PoolEntry) -> None:
        entry.putting += 1
        self._busy.add(entry.key)

    def end_put(self, entry: PoolEntry) -> None:
        assert entry.putting > 0
        entry.putting -= 1
        self._put_back_if_unused(entry)

    def _put_back_if_unused(self, entry: PoolEntry) -> None:
        if entry.is_busy:
            return
        self._busy.discard(entry.key)
        if not (entry.leases or entry.is_operator_pinned):
            self._policy.put_back(entry.key)

    def victims(self, count: int, protected: Container[bytes]) -> list[PoolEntry]:
        """Return up to ``count`` entries to evict, best first; none of them is ``protected``."""
        found: list[PoolEntry] = []
        in_use: list[bytes] = []
        for key in self._policy.candidates() if count > 0 else ():
            entry = self._entries[key]
            if entry.is_busy:
                in_use.append(key)
            elif key not in protected:
                found.append(entry)
                if len(found) == count:
                    break
        for key in in_use:
            # Otherwise each eviction would begin with all of them.
            self._policy.set_aside(key)
        return found

    # --- pins ---

    def may_pin(self, entry: PoolEntry | None) -> bool:
        """Whether an entry (None: one to come) has a pin or may get one."""
        return (entry is not None and self.has_pin(entry.key)) or self.pins_left > 0

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

    def room_s(self, now_s: float) -> float:
        """Return in how many seconds a full pool may have room, 0 if at any moment.

        The pins of requests end when these load the chunks, long before their deadline.
        """
        if self._request_pins or (self.pins_left > 0 and (self._busy or self._unfinished)):
            return 0.0
        return max(0.0, self._deadlines.first_s() - now_s)

    def pin(self, entry: PoolEntry, pin_s: float, now_s: float, holder: Holder = None) -> None:
        """Keep an entry for ``pin_s`` seconds from now, or from when its bytes are whole.

        A longer pin of the same holder stays. Pins of other holders are not changed.
        """
        assert not self.is_hidden(entry)
        until_s = now_s + pin_s if entry.state is EntryState.READY else pin_s
        until_s = max(until_s, entry.leases.get(holder, until_s))
        entry.awaited += holder is None
        self._keep_leases(entry, {**entry.leases, holder: until_s})

    def note_use(self, entry: PoolEntry, holder: Holder) -> None:
        """End a holder's pin of an entry that it holds now.

        Its use counts as that of one request for which the entry was prefetched. If those pins
        lasted until their deadline, what was used long ago would leave the next prompt no room.
        """
        self.end_pin(entry, holder)
        entry.awaited -= entry.awaited > 0
        if not entry.awaited:
            self.end_pin(entry, None)

    def end_pin(self, entry: PoolEntry, holder: Holder) -> None:
        """End one holder's pin, if it has one."""
        if holder in entry.leases:
            leases = {each: until for each, until in entry.leases.items() if each != holder}
            self._keep_leases(entry, leases)

    def end_expired(self, entry: PoolEntry, now_s: float) -> int:
        """End the pins of a ready entry whose deadline has passed; return how many."""
        kept = {holder: until_s for holder, until_s in entry.leases.items() if until_s > now_s}
        ended = len(entry.leases) - len(kept)
        self._keep_leases(entry, kept)
        return ended

    def _keep_leases(self, entry: PoolEntry, leases: Mapping[Holder, float]) -> None:
        if self.is_hidden(entry) or not (leases or entry.leases):
            return
        self._request_pins += _request_pins(leases) - _request_pins(entry.leases)
        entry.leases = leases or _NO_LEASES
        if None not in leases:
            entry.awaited = 0
        is_ready = entry.state is EntryState.READY
        self._deadlines.note(entry, min(leases.values(), default=None) if is_ready else None)
        if leases:
            self._pinned[entry.key] = entry
            if is_ready:
                self._policy.set_aside(entry.key)
            return
        del self._pinned[entry.key]
        if is_ready:
            # The request that it was pinned for counts as a use.
            self._policy.touch(entry.key)
            self._put_back_if_unused(entry)

    def expired_pins(self, now_s: float, most: int | None = None) -> list[PoolEntry]:
        """Return at most ``most`` entries with a pin whose deadline has passed.

        The first deadline comes first; of entries with the same one, the first that was pinned.
        """
        return list(islice(self._deadlines.past(now_s), most))

    def operator_pin(self, key: bytes) -> bool:
        """Pin a ready entry until `operator_unpin`; False when too much is pinned so."""
        if key in self._operator_pinned:
            return True
        if len(self._operator_pinned) >= self._max_operator_pinned:
            return False
        self._operator_pinned.add(key)
        self._entries[key].is_operator_pinned = True
        self._policy.set_aside(key)
        return True

    def operator_unpin(self, key: bytes) -> bool:
        """End an operator's pin; the chunk is the most recent then. False if there is none."""
        if key not in self._operator_pinned:
            return False
        self._operator_pinned.remove(key)
        entry = self._entries[key]
        entry.is_operator_pinned = False
        self._policy.touch(key)
        self._put_back_if_unused(entry)
        return True

    def check(self) -> None:
        slots = [entry.slot for entry in self]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot lost or shared"
        pinned, by_operator, in_policy = set(), set(), set()
        for key, entry in self._entries.items():
            assert key == entry.key and entry.holds >= 0 and entry.putting >= 0
            if entry.state is not EntryState.READY:
                assert not entry.is_busy, "unfinished bytes in use"
            elif entry.generation != _CLEARED:
                in_policy.add(key)
            else:
                assert entry.is_busy, "cleared alone, unused and still here"
            if not self.is_hidden(entry):
                pinned.update([key] if entry.leases else [])
                by_operator.update([key] if entry.is_operator_pinned else [])
        entries = self._entries.items()
        assert self._busy == {key for key, entry in entries if entry.is_busy}
        unfinished = {key for key, entry in entries if entry.state is not EntryState.READY}
        assert self._unfinished == unfinished
        order = [*self._policy.order()]
        assert len(order) == len(self._policy) and {*order} == in_policy
        assert pinned == self._pinned.keys()
        leases = [entry.leases for entry in self._pinned.values()]
        assert self._request_pins == sum(map(_request_pins, leases))
        self._deadlines.check(self._pinned.values())
        assert by_operator == self._operator_pinned
        assert len(by_operator) <= self._max_operator_pinned
        visible = {(entry.slot, key) for key, entry in entries if not self.is_hidden(entry)}
        sealed = self._seals.read() if self._seals is not None else ()
        assert {(seal.slot, seal.key) for seal in sealed} <= visible, "sealed, and not there"
        assert all(self._entries.get(key) is entry for key, entry in self._unsealed.items())
        candidates = {*self._policy.candidates()}
        assert not candidates & (pinned | by_operator), "pinned, and met by each eviction"
        for key in in_policy - candidates - pinned - by_operator:
            entry = self._entries[key]
            assert entry.is_busy or self.is_hidden(entry), "never looked at again by an eviction"
