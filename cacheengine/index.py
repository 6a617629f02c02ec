"""Which slot of the CPU pool holds which chunk, and who is using it.

Pure bookkeeping: no I/O, no clock, no threads. The caller serializes calls
and passes the time in.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cacheengine.eviction import EvictionPolicy


class State(Enum):
    """The life of an entry: filled from the GPU or from a tier, then ready."""

    STORING = auto()
    PROMOTING = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk in the pool.

    ``condemned`` entries were cleared while in use: nobody finds them any
    more, and their slot comes back when the last user is done.
    """

    key: bytes
    slot: int
    state: State
    holds: int = 0
    """Times held and not released."""
    putting: bool = False
    """A put to a lower tier is queued or reading the bytes."""
    pin_s: float = 0.0
    """How long to pin from the moment the entry gets ready."""
    pinned_until_s: float | None = None
    condemned: bool = False
    prefetched: bool = False
    """Promoted, and not held since."""
    put_wanted: bool = False
    """The queued put is still to be done."""

    @property
    def is_usable(self) -> bool:
        """Whether the bytes are whole and may be found."""
        return self.state is State.READY and not self.condemned

    def is_pinned(self, now_s: float) -> bool:
        """Whether a pin keeps the entry at that time."""
        return self.pinned_until_s is not None and self.pinned_until_s > now_s

    def is_idle(self, now_s: float) -> bool:
        """Whether nobody needs the bytes at that time."""
        return self.holds == 0 and not self.putting and not self.is_pinned(now_s)


class CpuIndex:
    """Entries by key, free slots, and the eviction of what nobody uses."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        # Popped from the end: low slots first, which makes tests readable.
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        policy.set_capacity(num_slots)
        self._policy = policy  # holds the READY entries that are not condemned
        self._pinned: dict[bytes, Entry] = {}

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
        return entry if entry is not None and entry.is_usable else None

    def ready_keys(self) -> list[bytes]:
        """Return the keys whose bytes may be used."""
        return list(self._policy.order())

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
        entry.state = State.READY
        self._policy.add(entry.key)
        if entry.pin_s > 0:
            self.pin(entry, now_s + entry.pin_s)

    def remove(self, entry: Entry) -> None:
        """Forget an entry that nobody uses, and free its slot."""
        assert entry.holds == 0 and not entry.putting
        if entry.is_usable:  # what was cleared left the policy in `condemn`
            self._policy.evict(entry.key)
        self.unpin(entry)
        del self._entries[entry.key]
        self._free.append(entry.slot)

    def condemn(self, entry: Entry) -> None:
        """Hide an entry for good; `remove` it when its last user is done."""
        if entry.state is State.READY:
            self._policy.remove(entry.key)
        self.unpin(entry)
        entry.condemned = True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of those keys that are ready."""
        for key in keys:
            if self.ready(key) is not None:
                self._policy.touch(key)

    def pin(self, entry: Entry, until_s: float) -> None:
        """Keep an entry from eviction until then, or longer if it was to be longer."""
        if entry.pinned_until_s is None or entry.pinned_until_s < until_s:
            entry.pinned_until_s = until_s
        self._pinned[entry.key] = entry

    def unpin(self, entry: Entry) -> None:
        """End an entry's pin, if it has one."""
        entry.pinned_until_s = None
        self._pinned.pop(entry.key, None)

    def expired_pins(self, now_s: float) -> list[Entry]:
        """Return entries whose pin has run out and was not taken off yet."""
        return [entry for entry in self._pinned.values() if not entry.is_pinned(now_s)]

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        slots = [entry.slot for entry in self._entries.values()]
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot lost or shared"
        ready = set()
        pinned = set()
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.holds >= 0
            if entry.is_usable:
                ready.add(key)
            else:
                assert entry.pinned_until_s is None, "a pin on what cannot be used"
            if entry.state is not State.READY:
                assert entry.holds == 0 and not entry.putting, "unfinished bytes in use"
            elif entry.condemned:
                assert entry.holds > 0 or entry.putting, "condemned, unused and still here"
            if entry.pinned_until_s is not None:
                pinned.add(key)
        order = list(self._policy.order())
        assert len(order) == len(self._policy) == len(ready) and set(order) == ready
        assert pinned == self._pinned.keys()
