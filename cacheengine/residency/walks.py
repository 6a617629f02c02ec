"""A prefix on its way up: what is pinned, waited for, read from below or asked for. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from cacheengine.residency.decisions import PORTION, Outcome, Promotion
from cacheengine.residency.entry import Entry, Holder, State
from cacheengine.residency.lower import LowerIndex, RemoteIndex
from cacheengine.residency.promoter import Promoter
from cacheengine.residency.state import CacheState


@dataclass(slots=True, eq=False)
class Walk:
    """A promotion that goes along a prefix, and waits where a tier must be asked.

    One thread at a time goes on with it: whichever began it, until that has asked for all that
    follows, then the one with the answer.
    """

    promotion: Promotion
    keys: Sequence[bytes]
    pin_s: float
    holder: Holder
    position: int = 0
    asks_from: int = 0
    """While the remote tier is being asked for what follows: the next to ask for."""
    protected: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.protected = frozenset(self.keys)

    @property
    def key(self) -> bytes:
        """The chunk that it has come to."""
        return self.keys[self.position]


class Walks:
    """Promotions from being asked for until each of their chunks is pinned or waited for.

    They share the remote tier's answers with lookups, whose questions go with theirs.
    """

    def __init__(self, state: CacheState, promoter: Promoter, remote: RemoteIndex | None) -> None:
        self._state = state
        self._promoter = promoter
        self._remote = remote
        # By the chunk whose answer they wait for; then in the queue of those to go on with.
        self._walks: dict[bytes, list[Walk]] = {}
        self._answered: deque[Walk] = deque()

    def begin(self, keys: Sequence[bytes], pin_s: float, holder: Holder) -> Walk:
        """Return a walk along a prefix, to `go_on` with: it has the promotion's counts."""
        self._state.stats.prefetches += 1
        return Walk(Promotion(len(keys)), keys, pin_s, holder)

    def go_on(self, walk: Walk, now_s: float) -> bool:
        """Pin what is ready, join what is under way, begin to read the rest; a portion of it.

        Where it is not known whether the remote tier holds a chunk, that tier is asked
        for it and for all that follow; the walk then goes on with the answer (`go_on_answered`).
        Returns whether the caller is to go on with it.
        """
        if walk.asks_from:
            return self._ask_on(walk, now_s)
        if not self._make_room_ahead(walk, now_s):
            return True
        for _ in range(PORTION):
            if walk.position == len(walk.keys):
                return False
            entry, outcome = self._state.cpu.get(walk.key), Outcome.MISSING
            if entry is None:
                source = self._promoter.source(walk.key, now_s)
                if source is None and self._is_asked(walk.key, now_s):
                    walk.asks_from = walk.position + 1
                    return self._ask_on(walk, now_s)
                if source is not None:
                    entry, outcome = self._begin_get(walk, source), self._refusal(walk)
            if entry is None or entry.condemned:
                self._end_walk(walk, outcome)
                return False
            self._join(entry, walk, now_s)
            walk.position += 1
        return walk.position < len(walk.keys)

    def _refusal(self, walk: Walk) -> Outcome:
        """What a chunk without room is: with as much pinned as may be there is none to come."""
        may_wait = walk.position < self._state.cpu.most_pinned
        return Outcome.REFUSED if may_wait else Outcome.MISSING

    def _end_walk(self, walk: Walk, outcome: Outcome) -> None:
        rest = len(walk.keys) - walk.position
        self._state.todo.settled.append((walk.promotion, outcome, rest))

    def _join(self, entry: Entry, walk: Walk, now_s: float) -> None:
        state = self._state
        if walk.pin_s > 0 and state.cpu.may_pin(entry):
            state.cpu.pin(entry, walk.pin_s, now_s, walk.holder)
        if entry.state is State.READY:
            state.todo.settled.append((walk.promotion, Outcome.RESIDENT, 1))
        else:
            state.waiters.setdefault(walk.key, []).append(walk.promotion)

    def _make_room_ahead(self, walk: Walk, now_s: float) -> bool:
        """Evict for the next portion; False: the search was cut short, and is to be repeated."""
        cpu = self._state.cpu
        if cpu.free_slots >= PORTION:
            return True
        wanted: set[bytes] = set()
        pins_left = cpu.pins_left
        for key in islice(walk.keys, walk.position, walk.position + PORTION):
            entry = cpu.get(key)
            has_no_pin = walk.pin_s > 0 and not cpu.has_pin(key)
            if entry is None:
                if self._promoter.source(key, now_s) is None or (has_no_pin and pins_left <= 0):
                    break
                wanted.add(key)
            pins_left -= has_no_pin
        room = self._state.make_room(len(wanted), walk.protected, now_s)
        return room.is_all or room.slots == len(wanted)

    def _begin_get(self, walk: Walk, source: LowerIndex) -> Entry | None:
        state = self._state
        # A chunk without a pin may be evicted before its use; and pins without
        # a limit would leave stores without room.
        is_allowed = walk.pin_s <= 0 or state.cpu.may_pin(None)
        if not is_allowed or not state.cpu.free_slots:
            state.stats.promote_drops += 1
            return None
        return self._promoter.begin_get(walk.key, source)

    # --- questions ---

    def ask(self, key: bytes, now_s: float) -> bool:
        """Ask the remote tier for a chunk that no tier is known to hold.

        Returns whether its answer is to be waited for: false when there is no
        such tier, it has said no a moment ago, is being left alone, or is slow.
        """
        remote = self._remote
        if remote is None:
            return False
        # One job takes all questions there are: a job for each would pile up
        # behind a slow one, as each step looks everything up again.
        job_is_queued = remote.has_questions
        will_be_answered = remote.ask(key, now_s)
        if remote.has_questions and not job_is_queued:
            self._state.todo.asks = True
        return will_be_answered and not remote.is_late(now_s)

    def _ask_on(self, walk: Walk, now_s: float) -> bool:
        """Ask for a portion of what follows the chunk that a walk has come to: one question.

        Returns whether to go on with the walk: there is more to ask for, or the answer for
        that chunk has come between two portions, when the walk did not wait for it yet.
        """
        assert self._remote is not None
        until = walk.asks_from + PORTION
        for key in islice(walk.keys, walk.asks_from, until):
            if self._state.cpu.get(key) is None and self._promoter.source(key, now_s) is None:
                self._remote.ask(key, now_s)
        if until < len(walk.keys):
            walk.asks_from = until
            return True
        walk.asks_from = 0
        # Now at last, so that all goes in one call; another's question may have taken some along.
        self._state.todo.asks |= self._remote.has_questions
        if not self._remote.is_asked(walk.key):
            return True
        self._walks.setdefault(walk.key, []).append(walk)
        return False

    def _is_asked(self, key: bytes, now_s: float) -> bool:
        """Whether the remote tier will answer for a chunk; the question may wait for more."""
        return self._remote is not None and self._remote.ask(key, now_s)

    def take_questions(self, most: int) -> list[bytes]:
        """Return chunks that the remote tier is to be asked for; then `answered`."""
        return [] if self._remote is None else self._remote.take_questions(most)

    def answered(self, keys: Sequence[bytes], found: Sequence[bool] | None, now_s: float) -> None:
        """Note the remote tier's answer, None if there was none; then `go_on_answered`."""
        assert self._remote is not None
        stats = self._state.stats.remote
        stats.asked += len(keys)
        stats.unanswered += len(keys) if found is None else 0
        stats.found += sum(found or ())
        self._state.gained(self._remote, self._remote.answered(keys, found, now_s))
        for key in keys:
            self._answered += self._walks.pop(key, ())

    def go_on_answered(self, now_s: float) -> bool:
        """Go on by a portion with a walk that waited for an answer; return whether there is more.

        The first of them first, until it ends or waits for another answer.
        """
        if self._answered and not self.go_on(self._answered[0], now_s):
            self._answered.popleft()
        return bool(self._answered)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        for key, walks in self._walks.items():
            assert self._remote is not None and self._remote.is_asked(key), "no answer will come"
            assert all(walk.key == key and not walk.promotion.done for walk in walks)
