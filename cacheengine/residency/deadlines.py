"""When pins end, the first to end first. Pure."""

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict

from cacheengine.residency.entry import Entry, State


class Deadlines:
    """Ready entries by when the first of their pins ends; equal ones in the order of pinning.

    A call pins many chunks until the same moment, so there are few deadlines at a time.
    """

    def __init__(self) -> None:
        self._entries: SortedDict[float, dict[bytes, Entry]] = SortedDict()

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
            self._entries.setdefault(due_s, {})[entry.key] = entry
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
