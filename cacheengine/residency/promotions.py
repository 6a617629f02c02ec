"""The way up: reads from lower tiers into the pool, for prefixes that were asked for. Pure."""

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from cacheengine.record import CPU
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import PORTION, Promotion, PromotionOutcome
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import EntryState, Holder, PoolEntry
from cacheengine.residency.read_queue import ReadQueue
from cacheengine.residency.shared_index import SharedIndex
from cacheengine.residency.state import CacheState
from cacheengine.tiers.tier import GetOutcome

logger = logging.getLogger("vllm.warmroute")


class Promoter:
    """Reads from being queued (`PrefixPromotions`) to their end.

    What was read from one tier is put to the tiers nearer than that, by ``cascades``.

    A read writes into its entry's slot. So an entry whose read has begun keeps the slot until the
    read ends, whatever happens meanwhile: the request is aborted, the pool is cleared, the tier
    hangs. Only reads that have not begun are given up, under the lock under which they would begin.
    """

    def __init__(self, state: CacheState, cascades: Mapping[str, Cascade]) -> None:
        self._state = state
        self._cascades = cascades
        self.reads: dict[str, ReadQueue] = {
            queue: ReadQueue(state.chunk_bytes) for index in state.lower for queue in index.queues
        }

    def queue(self, entry: PoolEntry, source: LowerIndex, now_s: float, *, is_demand: bool) -> None:
        """Queue the read of an entry from a tier."""
        source.begin_read(entry.key)
        queue = source.queue_of(entry.key)
        self.reads[queue].add(entry, now_s, is_demand=is_demand)
        self._state.work.gets[queue] += 1

    def join(self, entry: PoolEntry, promotion: Promotion) -> None:
        """Have a promotion wait for an entry that is not ready."""
        self._state.waiters.setdefault(entry.key, []).append(promotion)
        for queue, reads in self.reads.items():
            if entry.key in reads:
                if promotion.is_demand:
                    reads.hurry(entry.key)
                last = promotion.reads.get(queue, 0)
                promotion.reads[queue] = max(last, reads.number(entry.key) or 0)

    def leave(self, entry: PoolEntry, holder: str, now_s: float) -> None:
        """End a holder's wait for an entry; give its read up if nobody else waits."""
        waiters = self._state.waiters.get(entry.key, [])
        stay = [each for each in waiters if each.holder != holder]
        for each in waiters:
            if each.holder == holder:
                self._state.work.settled.append((each, PromotionOutcome.MISSING, 1))
        if stay:
            self._state.waiters[entry.key] = stay
            return
        self._state.waiters.pop(entry.key, None)
        for index in self._state.lower:
            if self.reads[index.queue_of(entry.key)].is_waiting(entry.key):
                self._cancel(index, entry, now_s)
                self._state.pool.remove(entry)

    def take(self, queue: str, most: int, now_s: float) -> list[PoolEntry]:
        """Begin at most ``most`` reads of a queue; `end` must follow for each."""
        return self.reads[queue].take(most, now_s)

    def end(
        self,
        index: LowerIndex,
        entries: Sequence[PoolEntry],
        outcomes: Sequence[GetOutcome],
        now_s: float,
    ) -> None:
        """Note how a batch of one queue ended: each chunk is visible, or was never there."""
        self.reads[index.queue_of(entries[0].key)].end(
            entries, now_s, outcomes.count(GetOutcome.OK) * self._state.chunk_bytes
        )
        self._count(index, outcomes)
        ends = [*zip(entries, outcomes, strict=True)]
        self._end_reads(index, ends, now_s)
        # The pool may have been cleared while the bytes came.
        is_hidden = self._state.pool.is_hidden
        whole = [each for each, end in ends if end is GetOutcome.OK and not is_hidden(each)]
        self._promoted(whole, index, now_s)
        for entry in entries:
            if entry.state is not EntryState.READY:
                self._read_failed(entry, now_s)

    def _promoted(self, entries: Sequence[PoolEntry], source: LowerIndex, now_s: float) -> None:
        state = self._state
        for entry in entries:
            entry.is_prefetched = True
            state.pool.publish(entry, now_s)
        keys = [entry.key for entry in entries]
        state.stats.promoted += len(keys)
        state.stats.promoted_bytes += len(keys) * state.chunk_bytes
        state.settle(keys, PromotionOutcome.PROMOTED)
        state.emit(CPU, stored=True, keys=keys)
        nearer = state.lower[: state.lower.index(source)]
        for entry in entries:
            for index in nearer:
                self._cascades[index.queue_of(entry.key)].queue(entry, now_s)
            state.remove_if_unwanted(entry, now_s)

    def _read_failed(self, entry: PoolEntry, now_s: float) -> None:
        state = self._state
        source = None if state.pool.is_hidden(entry) else state.source(entry.key, now_s)
        waiters = state.waiters.get(entry.key, ())
        if source is not None and waiters:
            # Another tier has it, too: the one that failed cannot be read for now.
            self.queue(entry, source, now_s, is_demand=any(each.is_demand for each in waiters))
            return
        state.pool.remove(entry)
        state.settle([entry.key], PromotionOutcome.MISSING)

    def watch(self, now_s: float) -> bool:
        """Read nothing from a path that hangs, and give up what has not begun, a portion.

        Returns whether there are more. Reads that have begun keep their slots until they end; then
        the path is read again.
        """
        is_more = False
        for index in self._state.lower:
            hanging = frozenset(each for each in index.queues if self.reads[each].is_stuck(now_s))
            for queue in sorted(hanging - index.hanging):
                logger.warning(
                    "%s tier: hangs in a read; nothing more is read until it ends", queue
                )
            for queue in sorted(index.hanging - hanging):
                logger.warning("%s tier: is read again", queue)
            index.hanging = hanging
            for queue in hanging:
                is_more |= self.give_up(index, queue, now_s)
        return is_more

    def give_up(self, index: LowerIndex, queue: str, now_s: float) -> bool:
        """End reads that have not begun, a portion; return whether there are more.

        A chunk that another tier has is read from there.
        """
        for entry in self.reads[queue].first(PORTION):
            self._cancel(index, entry, now_s)
            self._read_failed(entry, now_s)
        return self.reads[queue].waiting > 0

    def _cancel(self, index: LowerIndex, entry: PoolEntry, now_s: float) -> None:
        # That says nothing about the chunk.
        self.reads[index.queue_of(entry.key)].cancel(entry.key, now_s)
        self._end_reads(index, [(entry, GetOutcome.OK)], now_s)

    def _end_reads(
        self, index: LowerIndex, ends: Sequence[tuple[PoolEntry, GetOutcome]], now_s: float
    ) -> None:
        cleared = [each.key for each, end in ends if index.end_read(each.key, end, now_s)]
        self._state.delete(index, cleared)
        gone = [entry.key for entry, _ in ends if entry.key not in index]
        self._state.emit(index.name, stored=False, keys=gone)

    def _count(self, index: LowerIndex, outcomes: Sequence[GetOutcome]) -> None:
        stats = self._state.stats.below(index.name)
        whole = outcomes.count(GetOutcome.OK)
        stats.gets += whole
        stats.get_bytes += whole * self._state.chunk_bytes
        stats.get_misses += outcomes.count(GetOutcome.MISSING)
        stats.corrupt += outcomes.count(GetOutcome.DAMAGED)
        stats.io_errors += outcomes.count(GetOutcome.FAILED)

    def check(self) -> None:
        for reads in self.reads.values():
            reads.check()
        reading = {entry.key for entry in self._state.pool if entry.state is EntryState.PROMOTING}
        queued = [key for key in reading for reads in self.reads.values() if key in reads]
        assert len(queued) == len(reading), "a read that nothing ends"


@dataclass(slots=True, eq=False)
class PrefixPromotion:
    """A promotion on its way along a prefix; it waits where a tier must be asked.

    One thread at a time advances it: the one that began it, until it has asked for everything that
    follows, then the one with the answer.
    """

    promotion: Promotion
    keys: Sequence[bytes]
    protected: frozenset[bytes]
    """The same keys: they do not leave the pool for each other."""
    pin_s: float
    position: int = 0
    asks_from: int = 0
    """While it asks the remote tier for what follows: the position of the next question."""

    @property
    def key(self) -> bytes:
        """The chunk that it has come to."""
        return self.keys[self.position]


class PrefixPromotions:
    """Promotions from being asked for until each of their chunks is pinned or waited for.

    They share the remote tier's answers with lookups, whose questions go in the same calls.
    """

    def __init__(self, state: CacheState, promoter: Promoter, remote: SharedIndex | None) -> None:
        self._state = state
        self._promoter = promoter
        self._remote = remote
        # By the chunk whose answer they wait for; after the answer, in the queue.
        self._waiting: dict[bytes, list[PrefixPromotion]] = {}
        self._answered: deque[PrefixPromotion] = deque()

    def begin(
        self, keys: Sequence[bytes], pin_s: float, holder: Holder, *, is_demand: bool
    ) -> PrefixPromotion:
        """Return a promotion of a prefix, to `advance`; its `Promotion` has the counts."""
        self._state.stats.prefetches += 1
        promotion = Promotion(len(keys), holder, is_demand=is_demand)
        return PrefixPromotion(promotion, keys, frozenset(keys), pin_s)

    def leave(self, holder: str) -> None:
        """End the promotions of a holder that wait for an answer, before they begin to read."""
        for waiting in (*self._waiting.values(), self._answered):
            for prefix in [each for each in waiting if each.promotion.holder == holder]:
                self._end(prefix, PromotionOutcome.MISSING)
                waiting.remove(prefix)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting}

    def arrivals(
        self, keys: Sequence[bytes], queued: Counter[str], now_s: float
    ) -> list[float | None]:
        """Return in how many seconds each chunk is expected if it is promoted now; None: ready.

        ``queued`` counts the reads from each tier that this adds, for the next portion.
        """
        return [self._arrival(key, queued, now_s) for key in keys]

    def _arrival(self, key: bytes, queued: Counter[str], now_s: float) -> float | None:
        entry = self._state.entry(key)
        if entry is not None and self._state.pool.is_ready(entry):
            return None
        source = None if entry else self._state.source(key, now_s)
        for queue, reads in self._promoter.reads.items():
            number = reads.number(key) if key in reads else None
            if number is not None:
                return reads.arrival_s(number, now_s)
            if key in reads or (source is not None and source.queue_of(key) == queue):
                queued[queue] += 1
                return reads.backlog_s(queued[queue], now_s)
        # Being stored, or asked for: it will come soon, or not at all.
        return 0.0

    def arrival_s(self, promotion: Promotion, now_s: float) -> float:
        reads = self._promoter.reads
        numbers = promotion.reads.items()
        arrivals = (reads[queue].arrival_s(number, now_s) for queue, number in numbers)
        return max(arrivals, default=0.0)

    def is_stale(self, key: bytes, now_s: float) -> bool:
        """Whether the speed of the tier that a chunk would be read from is an old measurement."""
        source = self._state.source(key, now_s)
        return source is not None and self._promoter.reads[source.queue_of(key)].is_stale(now_s)

    def advance(self, prefix: PrefixPromotion, now_s: float) -> bool:
        """Pin ready chunks, join reads under way, begin to read the others; a portion of them.

        Where it is not known whether the remote tier holds a chunk, that tier is asked for it and
        for all that follow; the promotion continues with the answer (`advance_answered`). Returns
        whether the caller must advance it again.
        """
        if prefix.asks_from:
            return self._ask_on(prefix, now_s)
        self._make_room_ahead(prefix, now_s)
        remote = self._remote
        ready, is_more = 0, True
        for key in prefix.keys[prefix.position : prefix.position + PORTION]:
            entry, source = self._state.entry(key), None
            if entry is None:
                source = self._state.source(key, now_s)
                if source is not None:
                    entry = self._begin_get(prefix, source, now_s)
                elif remote is not None and remote.ask(key, now_s):
                    prefix.asks_from = prefix.position + 1
                    is_more = self._ask_on(prefix, now_s)
                    break
            if entry is None or self._state.pool.is_hidden(entry):
                self._end(prefix, self._refusal(prefix) if source else PromotionOutcome.MISSING)
                is_more = False
                break
            ready += self._join(entry, prefix, now_s)
            prefix.position += 1
        if ready:
            self._state.work.settled.append((prefix.promotion, PromotionOutcome.RESIDENT, ready))
        return is_more and prefix.position < len(prefix.keys)

    def _refusal(self, prefix: PrefixPromotion) -> PromotionOutcome:
        """Return the outcome of a chunk that finds no room.

        Beyond as many chunks as can be pinned, waiting for room does not help.
        """
        may_wait = prefix.position < self._state.pool.most_pinned
        return PromotionOutcome.REFUSED if may_wait else PromotionOutcome.MISSING

    def _end(self, prefix: PrefixPromotion, outcome: PromotionOutcome) -> None:
        rest = len(prefix.keys) - prefix.position
        self._state.work.settled.append((prefix.promotion, outcome, rest))

    def _join(self, entry: PoolEntry, prefix: PrefixPromotion, now_s: float) -> bool:
        """Pin a chunk; wait for it, or return that it is ready."""
        pool = self._state.pool
        if prefix.pin_s > 0 and pool.may_pin(entry):
            pool.pin(entry, prefix.pin_s, now_s, prefix.promotion.holder)
        is_ready = entry.state is EntryState.READY
        if not is_ready:
            self._promoter.join(entry, prefix.promotion)
        return is_ready

    def _make_room_ahead(self, prefix: PrefixPromotion, now_s: float) -> None:
        """Evict for the reads of the next portion."""
        pool = self._state.pool
        if pool.free_slots >= PORTION:
            return
        wanted: set[bytes] = set()
        pins_left = pool.pins_left
        for key in islice(prefix.keys, prefix.position, prefix.position + PORTION):
            needs_pin = prefix.pin_s > 0 and not pool.has_pin(key)
            if self._state.entry(key) is None:
                if self._state.source(key, now_s) is None or (needs_pin and pins_left <= 0):
                    break
                wanted.add(key)
            pins_left -= needs_pin
        self._state.make_room(len(wanted), prefix.protected, now_s)

    def _begin_get(
        self, prefix: PrefixPromotion, source: LowerIndex, now_s: float
    ) -> PoolEntry | None:
        pool = self._state.pool
        # A chunk without a pin may be evicted before its use; and pins without a limit would
        # leave stores without room.
        is_allowed = prefix.pin_s <= 0 or pool.may_pin(None)
        if not is_allowed or not pool.free_slots:
            self._state.stats.promote_drops += 1
            return None
        entry = pool.add(prefix.key, EntryState.PROMOTING)
        self._promoter.queue(entry, source, now_s, is_demand=prefix.promotion.is_demand)
        return entry

    # --- questions ---

    def ask(self, key: bytes, now_s: float) -> bool:
        """Ask the remote tier for a chunk that no tier is known to hold.

        Returns whether to wait for its answer: not if there is no such tier, it has just answered
        no, is being left alone, or is slow.
        """
        remote = self._remote
        if remote is None:
            return False
        job_is_queued = remote.has_questions
        will_be_answered = remote.ask(key, now_s)
        self._queue_job(remote, job_is_queued=job_is_queued)
        return will_be_answered and not remote.is_late(now_s)

    def renew(self, keys: Sequence[bytes], now_s: float) -> None:
        """Note a use of chunks: the remote tier is asked again for those it was not for long."""
        remote = self._remote
        if remote is None:
            return
        job_is_queued = remote.has_questions
        for key in keys:
            remote.renew(key, now_s)
        self._queue_job(remote, job_is_queued=job_is_queued)

    def _queue_job(self, remote: SharedIndex, *, job_is_queued: bool) -> None:
        """Have the questions asked that came up.

        One job takes all there are: a job for each would pile up behind a slow one, as each step
        looks everything up again.
        """
        if remote.has_questions and not job_is_queued:
            self._state.work.has_questions = True

    def _ask_on(self, prefix: PrefixPromotion, now_s: float) -> bool:
        """Ask for a portion of what follows the chunk that a promotion has come to.

        Returns whether to advance it again: there is more to ask for, or the answer for that
        chunk has come between two portions, before the promotion waited for it.
        """
        assert self._remote is not None
        until = prefix.asks_from + PORTION
        for key in islice(prefix.keys, prefix.asks_from, until):
            if self._state.entry(key) is None and self._state.source(key, now_s) is None:
                self._remote.ask(key, now_s)
        if until < len(prefix.keys):
            prefix.asks_from = until
            return True
        prefix.asks_from = 0
        # Only now, so that all go in one call. The job of another question may have taken some.
        self._state.work.has_questions |= self._remote.has_questions
        if not self._remote.is_asked(prefix.key):
            return True
        self._waiting.setdefault(prefix.key, []).append(prefix)
        return False

    def take_questions(self, most: int) -> list[bytes]:
        """Return chunks to ask the remote tier for; then `answered`."""
        return [] if self._remote is None else self._remote.take_questions(most)

    def watch(self, now_s: float) -> None:
        """Have a remote tier that failed pinged once in a while."""
        if self._remote is not None and self._remote.wants_ping(now_s):
            self._state.work.has_questions = True

    def answered(self, keys: Sequence[bytes], found: Sequence[bool] | None, now_s: float) -> None:
        """Note the remote tier's answer, None if there was none; then `advance_answered`."""
        assert self._remote is not None
        stats = self._state.stats.remote
        stats.asked += len(keys)
        stats.unanswered += len(keys) if found is None else 0
        stats.found += sum(found or ())
        self._state.gained(self._remote, self._remote.answered(keys, found, now_s))
        for key in keys:
            self._answered += self._waiting.pop(key, ())

    def advance_answered(self, now_s: float) -> bool:
        """Advance a promotion that waited for an answer by a portion; return if there is more.

        The first of them is advanced until it ends or waits for another answer.
        """
        if self._answered and not self.advance(self._answered[0], now_s):
            self._answered.popleft()
        return bool(self._answered)

    def check(self) -> None:
        for key, waiting in self._waiting.items():
            assert self._remote is not None and self._remote.is_asked(key), "no answer will come"
            assert all(each.key == key and not each.promotion.done for each in waiting)
