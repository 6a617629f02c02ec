"""The way up: which chunks are read from lower tiers into the pool. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence

from cacheengine.record import CPU
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import Outcome
from cacheengine.residency.entry import Entry, State
from cacheengine.residency.lower import LowerIndex
from cacheengine.residency.state import CacheState
from cacheengine.tiers import GetOutcome


class Promoter:
    """Reads from being queued, for a prefix on its way up (`Walks`), to their end.

    What was read from one tier is put to those that are nearer, by ``cascades``.
    """

    def __init__(self, state: CacheState, cascades: Mapping[str, Cascade]) -> None:
        self._state = state
        self._cascades = cascades
        self._waiting: dict[str, deque[Entry]] = {index.name: deque() for index in state.lower}

    def source(self, key: bytes, now_s: float) -> LowerIndex | None:
        """Return the nearest lower tier that a chunk can be read from."""
        for index in self._state.lower:
            if index.can_read(key, now_s):
                return index
        return None

    def begin_get(self, key: bytes, source: LowerIndex) -> Entry:
        """Take a free slot for a chunk, and queue its read from a tier."""
        entry = self._state.cpu.add(key, State.PROMOTING)
        self._queue(entry, source)
        return entry

    def _queue(self, entry: Entry, source: LowerIndex) -> None:
        source.begin_read(entry.key)
        self._waiting[source.name].append(entry)
        self._state.todo.gets[source.name] += 1

    # --- reads ---

    def waiting(self, tier: str) -> int:
        """How many reads from a tier have not begun."""
        return len(self._waiting[tier])

    def take(self, tier: str, most: int) -> list[Entry]:
        """Return the entries to read next from a tier, at most so many; then `end`."""
        queue = self._waiting[tier]
        return [queue.popleft() for _ in range(min(most, len(queue)))]

    def end(
        self,
        index: LowerIndex,
        entries: Sequence[Entry],
        outcomes: Sequence[GetOutcome],
        now_s: float,
    ) -> None:
        """Note how reads from a tier ended: a chunk is visible, or it was never there."""
        for entry, outcome in zip(entries, outcomes, strict=True):
            self._count(index, outcome)
            self._end_read(index, entry.key, outcome, now_s)
            self._state.cpu.meet(entry.key)  # if the pool was cleared, the entry is condemned now
            if outcome is GetOutcome.OK and not entry.condemned:
                self._promoted(entry, index, now_s)
            else:
                self._read_failed(entry, now_s)

    def _promoted(self, entry: Entry, source: LowerIndex, now_s: float) -> None:
        state = self._state
        entry.in_use.prefetched = True
        state.stats.promoted += 1
        state.stats.promoted_bytes += state.chunk_bytes
        state.cpu.publish(entry, now_s)
        state.settle(entry.key, Outcome.PROMOTED)
        state.emit(CPU, stored=True, keys=[entry.key])
        for index in state.lower[: state.lower.index(source)]:
            self._cascades[index.name].queue(entry, now_s)
        state.drop_if_unwanted(entry, now_s)

    def _read_failed(self, entry: Entry, now_s: float) -> None:
        source = None if entry.condemned else self.source(entry.key, now_s)
        if source is not None:
            # Another tier has it, too: the one that failed cannot be read for now.
            self._queue(entry, source)
            return
        self._state.cpu.remove(entry)
        self._state.settle(entry.key, Outcome.MISSING)

    def give_up(self, index: LowerIndex, entries: Sequence[Entry], now_s: float) -> None:
        """End reads that were taken and never begun, which says nothing about the chunks."""
        for entry in entries:
            self._end_read(index, entry.key, GetOutcome.OK, now_s)
            self._state.cpu.meet(entry.key)
            self._state.cpu.remove(entry)
            self._state.settle(entry.key, Outcome.MISSING)

    def _end_read(self, index: LowerIndex, key: bytes, outcome: GetOutcome, now_s: float) -> None:
        could_be_found = key in index
        if index.end_read(key, outcome, now_s):
            self._state.delete(index, [key])
        if could_be_found and key not in index:
            self._state.emit(index.name, stored=False, keys=[key])

    def _count(self, index: LowerIndex, outcome: GetOutcome) -> None:
        stats = self._state.stats.below(index.name)
        match outcome:
            case GetOutcome.OK:
                stats.gets += 1
                stats.get_bytes += self._state.chunk_bytes
            case GetOutcome.MISSING:
                stats.get_misses += 1
            case GetOutcome.DAMAGED:
                stats.corrupt += 1
            case GetOutcome.FAILED:
                stats.io_errors += 1

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        queued = [entry for queue in self._waiting.values() for entry in queue]
        assert len(queued) == len({entry.key for entry in queued}), "read twice"
        for entry in queued:
            assert self._state.cpu.peek(entry.key) is entry
            assert entry.state is State.PROMOTING
