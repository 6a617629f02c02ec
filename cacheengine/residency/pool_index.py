"""Which slot of the CPU pool holds which chunk, and who is using it.

Pure bookkeeping: no I/O, no clock, no threads. The caller serializes calls
and passes the time in.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from cacheengine.residency.eviction import EvictionPolicy
from cacheengine.wire import MAX_PINNED_SHARE

_KEPT_SHARE: Final = 0.5


class State(Enum):
    """The life of an entry: filled from the GPU or from a tier, then ready."""

    STORING = auto()
    PROMOTING = auto()
    READY = auto()


@dataclass(slots=True)
class Use:
    """What goes on with a chunk, beyond lying in the pool, ready.

    ``condemned`` chunks were cleared while in use: nobody finds them any more,
    and their slot comes back when the last user is done.
    """

    state: State = State.READY
    holds: int = 0
    """Times held and not released."""
    putting: int = 0
    """Puts to lower tiers that are queued or reading the bytes."""
    pin_s: float = 0.0
    """How long to pin from the moment the entry gets ready."""
    pinned_until_s: float | None = None
    kept: bool = False
    """Pinned by an operator."""
    condemned: bool = False
    prefetched: bool = False
    """Promoted or copied here for a request, and not held since."""


_NOTHING: Final = Use()  # shared by all: never written to


class Entry:
    """One chunk in the pool. One that nothing goes on with has no `Use`: there are millions."""

    __slots__ = ("key", "slot", "use")

    def __init__(self, key: bytes, slot: int, state: State) -> None:
        self.key = key
        self.slot = slot
        self.use: Use | None = Use(state)

    @property
    def state(self) -> State:
        """Whether the bytes are whole, and if not, where they come from."""
        return self.seen.state

    @property
    def seen(self) -> Use:
        """What goes on, to read only."""
        return self.use or _NOTHING

    @property
    def in_use(self) -> Use:
        """What goes on, to change; `CpuIndex.tidy` after something has ended."""
        if self.use is None:
            self.use = Use()
        return self.use

    @property
    def condemned(self) -> bool:
        """Whether it was cleared."""
        return self.seen.condemned

    @property
    def is_usable(self) -> bool:
        """Whether the bytes are whole and may be found."""
        return self.use is None or (self.use.state is State.READY and not self.use.condemned)

    @property
    def is_busy(self) -> bool:
        """Whether someone reads the bytes, or is about to."""
        use = self.seen
        return use.holds > 0 or use.putting > 0

    def is_pinned(self, now_s: float) -> bool:
        """Whether a pin keeps the entry at that time."""
        use = self.seen
        return use.kept or (use.pinned_until_s is not None and use.pinned_until_s > now_s)

    def is_idle(self, now_s: float) -> bool:
        """Whether nobody needs the bytes at that time."""
        return self.use is None or not (self.is_busy or self.is_pinned(now_s))

    def __repr__(self) -> str:
        return f"<Entry {self.key.hex()[:8]} slot={self.slot} {self.state} {self.use}>"


class CpuIndex:
    """Entries by key, free slots, and the eviction of what nobody uses.

    Pins are bounded, so that stores find room: operators' to half of the
    slots, all together (`may_pin`) to three quarters.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        # Popped from the end: low slots first, which makes tests readable.
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        policy.set_capacity(num_slots)
        # Holds the READY entries that are neither condemned nor kept: kept ones
        # would gather at its front, and be passed over by every eviction.
        self._policy = policy
        self._pinned: dict[bytes, Entry] = {}  # those that will be when ready included
        self._kept: set[bytes] = set()
        self._max_kept = int(_KEPT_SHARE * num_slots)
        self._max_pinned = max(1, int(MAX_PINNED_SHARE * num_slots))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of a key, condemned or not."""
        return self._entries.get(key)

    def ready(self, key: bytes) -> Entry | None:
        """Return the entry of a key if its bytes may be used."""
        entry = self._entries.get(key)
        # `use` first: a lookup of a long prefix comes here for every chunk.
        return entry if entry is not None and (entry.use is None or entry.is_usable) else None

    def ready_keys(self) -> list[bytes]:
        """Return the keys whose bytes may be used."""
        return [*self._policy.order(), *self._kept]

    def victims(self, count: int, keep: Collection[bytes], now_s: float) -> list[Entry]:
        """Return up to ``count`` entries to evict, best first. Changes nothing."""
        found: list[Entry] = []
        if count <= 0:
            return found
        for key in self._policy.order():
            entry = self._entries[key]
            if key not in keep and entry.is_idle(now_s):
                found.append(entry)
                if len(found) == count:
                    break
        return found

    def add(self, key: bytes, state: State) -> Entry:
        """Give a key that has no entry a free slot; the caller saw to it that there is one."""
        assert key not in self._entries
        entry = Entry(key, self._free.pop(), state)
        self._entries[key] = entry
        return entry

    def publish(self, entry: Entry, now_s: float) -> None:
        """Make an entry visible: its bytes are whole."""
        assert entry.state is not State.READY and not entry.condemned
        entry.in_use.state = State.READY
        self._policy.add(entry.key)
        if entry.seen.pin_s > 0:
            self.pin(entry, now_s + entry.seen.pin_s)
        self.tidy(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry that nobody uses, and free its slot."""
        assert not entry.is_busy and not entry.seen.kept
        if entry.is_usable:  # what was cleared left the policy in `condemn`
            self._policy.evict(entry.key)
        self.unpin(entry)
        del self._entries[entry.key]
        self._free.append(entry.slot)

    def condemn(self, entry: Entry) -> None:
        """Hide an entry for good; `remove` it when its last user is done."""
        self.unpin(entry)
        self.let_go(entry)
        if entry.state is State.READY:
            self._policy.remove(entry.key)
        entry.in_use.condemned = True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of those keys that are ready."""
        for key in keys:
            if self.ready(key) is not None and key not in self._kept:
                self._policy.touch(key)

    def tidy(self, entry: Entry) -> None:
        """Save the memory of a `Use` that says nothing."""
        if entry.use == _NOTHING:
            entry.use = None

    # --- pins ---

    def may_pin(self, entry: Entry | None) -> bool:
        """Whether an entry (None: one to come) has a pin or may get one."""
        if entry is not None and entry.key in self._pinned:
            return True
        return len(self._pinned) + len(self._kept) < self._max_pinned

    def pin(self, entry: Entry, until_s: float) -> None:
        """Keep an entry from eviction until then, or longer if it was to be longer."""
        use = entry.in_use
        use.pin_s = 0.0
        if use.pinned_until_s is None or use.pinned_until_s < until_s:
            use.pinned_until_s = until_s
        self._pinned[entry.key] = entry

    def pin_when_ready(self, entry: Entry, pin_s: float) -> None:
        """Pin an entry for so long, or longer, from when its bytes are there."""
        if pin_s > 0:
            entry.in_use.pin_s = max(entry.seen.pin_s, pin_s)
            self._pinned[entry.key] = entry

    def unpin(self, entry: Entry) -> None:
        """End an entry's pin, if it has one; an operator's stays."""
        if self._pinned.pop(entry.key, None) is not None:
            entry.in_use.pinned_until_s = None
            entry.in_use.pin_s = 0.0
            self.tidy(entry)

    def expired_pins(self, now_s: float) -> list[Entry]:
        """Return entries whose pin has run out and was not taken off yet."""
        return [
            entry
            for entry in self._pinned.values()
            if entry.seen.pinned_until_s is not None and entry.seen.pinned_until_s <= now_s
        ]

    def keep(self, entry: Entry) -> bool:
        """Pin a ready entry until `let_go`; False when too much is pinned so."""
        if entry.key in self._kept:
            return True
        if len(self._kept) >= self._max_kept:
            return False
        self._kept.add(entry.key)
        self._policy.remove(entry.key)
        entry.in_use.kept = True
        return True

    def let_go(self, entry: Entry) -> bool:
        """End an operator's pin, as if the chunk had just come; False if there is none."""
        if entry.key not in self._kept:
            return False
        self._kept.remove(entry.key)
        self._policy.add(entry.key)
        entry.in_use.kept = False
        self.tidy(entry)
        return True

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        slots = [entry.slot for entry in self._entries.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot lost or shared"
        assert Use() == _NOTHING, "written to what all share"
        ready, pinned, kept = set(), set(), set()
        for key, entry in self._entries.items():
            assert entry.key == key
            _check(entry)
            if entry.is_usable:
                ready.add(key)
            if entry.seen.pinned_until_s is not None or entry.seen.pin_s > 0:
                pinned.add(key)
            if entry.seen.kept:
                kept.add(key)
        order = list(self._policy.order())
        assert len(order) == len(self._policy) and {*order} == ready - kept
        assert pinned == self._pinned.keys()
        assert kept == self._kept and len(kept) <= self._max_kept
        assert kept <= ready


def count_held(entries: Iterable[Entry], now_s: float) -> int:
    """Count the entries that cannot be evicted at that time: not ready, in use or pinned.

    Others may change them meanwhile: each counts as it was at some moment.
    """
    return sum(
        not (entry.is_usable and entry.is_idle(now_s)) for entry in entries if entry.use is not None
    )


def _check(entry: Entry) -> None:
    use = entry.seen
    assert use.holds >= 0 and use.putting >= 0
    if not entry.is_usable:
        assert use.pinned_until_s is None, "a pin on what cannot be used"
    if entry.state is not State.READY:
        assert not entry.is_busy, "unfinished bytes in use"
        return
    assert use.pin_s == 0.0, "a pin that never began"
    if entry.condemned:
        assert entry.is_busy, "condemned, unused and still here"
