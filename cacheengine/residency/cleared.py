"""What the pool held when all of it was cleared. Pure.

Hidden in one step, by putting its tables aside; its slots come back as its entries are met,
one after the other. An entry in use keeps its slot, as one does that was cleared alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cacheengine.residency.entry import Entry, State, Use
from cacheengine.residency.eviction import EvictionPolicy
from cacheengine.residency.pins import Deadlines
from cacheengine.residency.shards import TakenKeys, part_of

GONE: Final = Use(condemned=True)  # of all that were met and had no use: never written to


@dataclass(slots=True, eq=False)
class Cleared:
    """The tables of before a clear; `CpuIndex` says what they are."""

    parts: list[dict[bytes, Entry]]
    """The ready entries; no part changes, as the followers of events are told its keys."""
    taken: list[TakenKeys]
    """These keys, part by part."""
    others: dict[bytes, Entry]
    policy: EvictionPolicy
    pinned: dict[bytes, Entry]
    deadlines: Deadlines
    operator_pinned: set[bytes]
    emptied: list[object]
    """Tables that are done with: to let go of thousands of entries takes a while."""
    _rest: Iterator[Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._rest = self._entries()

    def _entries(self) -> Iterator[Entry]:
        while self.others:
            yield self.others.popitem()[1]
        for number, part in enumerate(self.parts):
            for entry in part.values():
                if not entry.condemned:  # else it was met
                    yield entry
            self.parts[number] = {}
            self.taken[number].settle()
            self.emptied.append(part)

    def take(self, key: bytes) -> Entry | None:
        """Return the entry of a key that was not met yet, which then is."""
        entry = self.others.pop(key, None)
        if entry is None:
            entry = self._ready(key)
        return self._met(entry)

    def next(self) -> Entry | None:
        """Return some entry that was not met yet, which then is; None: there are no more."""
        return self._met(next(self._rest, None))

    def peek(self, key: bytes) -> Entry | None:
        """Return the entry of a key that was not met yet."""
        return self.others.get(key) or self._ready(key)

    def _ready(self, key: bytes) -> Entry | None:
        entry = self.parts[part_of(key)].get(key)
        return None if entry is None or entry.condemned else entry

    def _met(self, entry: Entry | None) -> Entry | None:
        if entry is not None:
            if entry.state is State.READY and not entry.condemned:
                if entry.key in self.operator_pinned:
                    self.operator_pinned.remove(entry.key)
                else:
                    self.policy.remove(entry.key)
            if self.pinned.pop(entry.key, None) is not None:
                self.deadlines.note(entry, None)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries that were not met yet; not for where there are many."""
        yield from self.others.values()
        for part in self.parts:
            yield from (entry for entry in part.values() if not entry.condemned)
