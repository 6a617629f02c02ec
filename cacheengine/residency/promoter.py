"""The way up: which chunks are read from lower tiers into the pool. Pure."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cacheengine.record import CPU
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import Outcome, Promotion
from cacheengine.residency.entry import Entry, Holder, State
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.shared_index import RemoteIndex
from cacheengine.residency.state import CacheState
from cacheengine.tiers import GetOutcome


@dataclass(slots=True, eq=False)
class _Walk:
    """A promotion that goes along a prefix, and waits where a tier must be asked."""

    promotion: Promotion
    keys: Sequence[bytes]
    pin_s: float
    holder: Holder
    position: int = 0

    @property
    def key(self) -> bytes:
        return self.keys[self.position]


class Promoter:
    """Promotions from being asked for to the end of their reads.

    What was read from one tier is put to those that are nearer, by ``cascades``.
    """

    def __init__(
        self, state: CacheState, remote: RemoteIndex | None, cascades: Mapping[str, Cascade]
    ) -> None:
        self._state = state
        self._remote = remote
        self._cascades = cascades
        self._waiting: dict[str, deque[Entry]] = {index.name: deque() for index in state.lower}
        self._walks: dict[bytes, list[_Walk]] = {}

    def begin(self, keys: Sequence[bytes], pin_s: float, now_s: float, holder: Holder) -> Promotion:
        """Pin what is ready, join what is under way, begin to read the rest, in order.

        Where it is not known whether the remote tier holds a chunk, that tier is asked
        for it and for all that follow, and the walk goes on with the answer.
        """
        self._state.stats.prefetches += 1
        promotion = Promotion(len(keys))
        self._go_on(_Walk(promotion, keys, pin_s, holder), now_s)
        return promotion

    def _go_on(self, walk: _Walk, now_s: float) -> None:
        protected = set(walk.keys)
        while walk.position < len(walk.keys):
            entry = self._state.cpu.get(walk.key)
            if entry is None:
                source = self.source(walk.key, now_s)
                if source is None and self._ask(walk, now_s):
                    return
                if source is not None:
                    entry = self._begin_get(walk, source, protected, now_s)
                    if entry is None:
                        # With as much pinned as may be it has all the room that there can be.
                        may_wait = walk.position < self._state.cpu.most_pinned
                        self._end_walk(walk, Outcome.REFUSED if may_wait else Outcome.MISSING)
                        return
            if entry is None or entry.condemned:
                self._end_walk(walk, Outcome.MISSING)
                return
            self._join(entry, walk, now_s)
            walk.position += 1

    def _end_walk(self, walk: _Walk, outcome: Outcome) -> None:
        rest = len(walk.keys) - walk.position
        self._state.todo.settled.append((walk.promotion, outcome, rest))

    def _join(self, entry: Entry, walk: _Walk, now_s: float) -> None:
        state = self._state
        if walk.pin_s > 0 and state.cpu.may_pin(entry):
            state.cpu.pin(entry, walk.pin_s, now_s, walk.holder)
        if entry.state is State.READY:
            state.todo.settled.append((walk.promotion, Outcome.RESIDENT, 1))
        else:
            state.waiters.setdefault(walk.key, []).append(walk.promotion)

    def source(self, key: bytes, now_s: float) -> LowerIndex | None:
        """Return the nearest lower tier that a chunk can be read from."""
        for index in self._state.lower:
            if index.can_read(key, now_s):
                return index
        return None

    def _begin_get(
        self, walk: _Walk, source: LowerIndex, protected: Collection[bytes], now_s: float
    ) -> Entry | None:
        state = self._state
        # A chunk without a pin may be evicted before its use; and pins without
        # a limit would leave stores without room.
        is_allowed = walk.pin_s <= 0 or state.cpu.may_pin(None)
        if not is_allowed or not state.make_room(1, protected, now_s)[0]:
            state.stats.promote_drops += 1
            return None
        entry = state.cpu.add(walk.key, State.PROMOTING)
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

    # --- questions ---

    def ask(self, key: bytes, now_s: float) -> bool:
        """Ask the remote tier for a chunk that no tier is known to hold.

        Returns whether its answer is to be waited for: false when there is no
        such tier, it has said no a moment ago, is being left alone, or is slow.
        """
        remote = self._remote
        return remote is not None and self._question(key, now_s) and not remote.is_late(now_s)

    def _ask(self, walk: _Walk, now_s: float) -> bool:
        """Ask for what a walk has come to, and for all that follows: one question."""
        if not self._question(walk.key, now_s):
            return False
        for key in walk.keys[walk.position + 1 :]:
            if self._state.cpu.get(key) is None and self.source(key, now_s) is None:
                self._question(key, now_s)
        self._walks.setdefault(walk.key, []).append(walk)
        return True

    def _question(self, key: bytes, now_s: float) -> bool:
        """Ask the remote tier for a chunk; return whether an answer will come."""
        remote = self._remote
        if remote is None:
            return False
        # One job takes all questions there are: a job for each would pile up
        # behind a slow one, as each step looks everything up again.
        job_is_queued = remote.has_questions
        will_be_answered = remote.ask(key, now_s)
        if remote.has_questions and not job_is_queued:
            self._state.todo.asks = True
        return will_be_answered

    def take_questions(self, most: int) -> list[bytes]:
        """Return chunks that the remote tier is to be asked for; then `answered`."""
        return [] if self._remote is None else self._remote.take_questions(most)

    def answered(self, keys: Sequence[bytes], found: Sequence[bool] | None, now_s: float) -> None:
        """Note the remote tier's answer, None if there was none; go on with what waited for it."""
        assert self._remote is not None
        stats = self._state.stats.remote
        stats.asked += len(keys)
        stats.unanswered += len(keys) if found is None else 0
        stats.found += sum(found or ())
        self._state.gained(self._remote, self._remote.answered(keys, found, now_s))
        for key in keys:
            for walk in self._walks.pop(key, ()):
                self._go_on(walk, now_s)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        queued = [entry for queue in self._waiting.values() for entry in queue]
        assert len(queued) == len({entry.key for entry in queued}), "read twice"
        for entry in queued:
            assert self._state.cpu.get(entry.key) is entry
            assert entry.state is State.PROMOTING
        for key, walks in self._walks.items():
            assert self._remote is not None and self._remote.is_asked(key), "no answer will come"
            assert all(walk.key == key and not walk.promotion.done for walk in walks)
