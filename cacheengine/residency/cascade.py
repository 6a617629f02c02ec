"""The way down: which chunks are put to a lower tier, and when not. Pure."""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from cacheengine.residency.decisions import PORTION
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import PoolEntry
from cacheengine.residency.state import CacheState
from cacheengine.tiers.store import SLOWEST_BYTES_S
from cacheengine.tiers.tier import LONGEST_BACKOFF_S, PutOutcome, tier_backoff

_TRIES: Final = 3
"""Writes of one chunk before it is given up."""
_STUCK_S: Final = 10.0
"""A tier that ends no write for longer hangs; a large chunk gets more."""
_MOST_DROPPED: Final = 16_384
"""Chunks remembered whose put was dropped; beyond that the oldest are given up."""
_MOST_LOST: Final = 65_536
"""Chunks remembered that left the pool unwritten; beyond that the oldest are forgotten."""
_FIRST_USE_SHARE: Final = 0.75
"""The part of the queue that chunks stored for the first time get."""


@dataclass(slots=True, eq=False)
class _Put:
    entry: PoolEntry
    number: int
    tries: int = 0
    is_wanted: bool = True


class Cascade:
    """The puts of one of a tier's queues until their end, at most ``max_queued`` at once.

    An entry whose put is queued or under way is not evicted. After a failure the tier is left
    alone for a while; after the last failure the longest backoff must pass before the tier may
    use its whole capacity again. A put that is dropped is tried again while its chunk is in the
    pool (`retry`); a put that fails is tried three times in all. While the tier hangs, puts that
    have not begun are dropped. One that has begun reads its entry's slot, which it keeps.

    A tier that is too slow for all puts gets the chunks that are used again: the last quarter of
    the queue is for chunks that come back after their put was dropped.
    """

    def __init__(
        self,
        state: CacheState,
        index: LowerIndex,
        max_queued: int,
        queue: str | None = None,
        *,
        first_use_share: float = _FIRST_USE_SHARE,
    ) -> None:
        self._state = state
        self._index = index
        self._queue_name = queue or index.name
        self._stats = state.stats.below(index.name)
        self._max_queued = max_queued
        self._max_first_uses = ceil(first_use_share * max_queued)
        self._backoff = tier_backoff()
        self._grow_at_s = float("-inf")
        self._stuck_s = _STUCK_S + state.chunk_bytes / SLOWEST_BYTES_S
        # The last time that a put ended, or the first was queued.
        self._moved_s = float("-inf")
        self._waiting: deque[_Put] = deque()
        self._by_key: dict[bytes, _Put] = {}  # puts under way included
        state.dropped[self._queue_name] = OrderedDict()
        # Chunks that left the pool after their put was dropped, the first at the front.
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        self._next_number = 0
        # Puts with smaller numbers were cancelled, all in one step.
        self._first_wanted = 0

    @property
    def _dropped(self) -> OrderedDict[bytes, int]:
        return self._state.dropped[self._queue_name]

    @property
    def queued_bytes(self) -> int:
        """Bytes whose put is queued or under way."""
        return len(self._by_key) * self._state.chunk_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def queue(self, entry: PoolEntry, now_s: float) -> None:
        """Queue the put of a chunk of the pool, unless it is below already or must be dropped."""
        if not self._index.is_there or self._is_below(entry.key):
            return
        # A chunk that comes back after its put was dropped is used again.
        is_first_use = entry.key not in self._lost and entry.key not in self._dropped
        self._lost.pop(entry.key, None)
        if self._can_queue(now_s, is_first_use=is_first_use):
            self._queue(entry, self._dropped.pop(entry.key, 0), now_s)
        else:
            self._drop(entry, self._dropped.get(entry.key, 0), now_s)

    def _is_below(self, key: bytes) -> bool:
        is_queued = key in self._by_key
        return is_queued or (self._index.is_known(key) and not self._index.must_rewrite(key))

    def _can_queue(self, now_s: float, *, is_first_use: bool = True) -> bool:
        most = self._max_first_uses if is_first_use else self._max_queued
        is_free = len(self._by_key) < most
        return is_free and not self._backoff.is_on(now_s) and not self._is_stuck(now_s)

    def _is_stuck(self, now_s: float) -> bool:
        return bool(self._by_key) and now_s - self._moved_s > self._stuck_s

    def watch(self, now_s: float) -> bool:
        """Drop puts to a tier that hangs, a portion; return whether there are more."""
        if self._is_stuck(now_s):
            for _ in range(min(PORTION, len(self._waiting))):
                put = self._waiting.popleft()
                self._drop_queued(put, now_s)
                self._leave(put.entry, now_s)
            return bool(self._waiting)
        return False

    def _queue(self, entry: PoolEntry, tries: int, now_s: float) -> None:
        if not self._by_key:
            self._moved_s = now_s
        self._state.pool.begin_put(entry)
        put = _Put(entry, self._next_number, tries)
        self._next_number += 1
        self._waiting.append(put)
        self._by_key[entry.key] = put
        self._state.work.puts[self._queue_name] += 1

    def _drop(self, entry: PoolEntry, tries: int, now_s: float) -> None:
        self._stats.put_drops += 1
        if tries < _TRIES:
            self._dropped[entry.key] = tries
        if len(self._dropped) > _MOST_DROPPED:
            key, _ = self._dropped.popitem(last=False)
            oldest = self._state.pool.ready(key)
            if oldest is not None:
                self._state.remove_if_unwanted(oldest, now_s)
            else:
                self._lose(key)

    def _lose(self, key: bytes) -> None:
        self._lost[key] = None
        if len(self._lost) > _MOST_LOST:
            self._lost.popitem(last=False)

    def put_again(self, keys: Collection[bytes], now_s: float) -> None:
        """Queue the puts of chunks that the tier has lost, as far as they are in the pool."""
        self._state.emit(self._index.name, stored=False, keys=keys)
        for entry in filter(None, map(self._state.pool.ready, keys)):
            self.queue(entry, now_s)

    def retry(self, now_s: float) -> None:
        """Queue again puts that were dropped, a portion of them, of chunks still in the pool."""
        for _ in range(PORTION):
            if not self._dropped or not self._can_queue(now_s):
                return
            key, tries = self._dropped.popitem(last=False)
            entry = self._state.pool.ready(key)
            if entry is None:
                self._lose(key)
                continue
            if self._is_below(key):
                self._state.remove_if_unwanted(entry, now_s)
            else:
                self._stats.put_retries += 1
                self._queue(entry, tries, now_s)

    def begin(self, most: int, now_s: float) -> tuple[list[PoolEntry], list[bytes]]:
        """Reserve room below for at most ``most`` queued puts, the oldest first.

        Returns the entries to write, for each of which `end` must follow, and the chunks to delete
        first (then `deleted`). Puts that must be dropped have ended; after a portion of dropped
        ones the entries may be none while more puts wait.
        """
        entries: list[PoolEntry] = []
        victims: list[bytes] = []
        rewritten: list[bytes] = []  # they cannot be found meanwhile
        for _ in range(most + PORTION):
            if not self._waiting or len(entries) == most:
                break
            put = self._waiting.popleft()
            key = put.entry.key
            if self._index.is_known(key) and not self._index.must_rewrite(key):
                # A shared tier was asked for it since, and has it from another engine.
                self._leave(put.entry, now_s)
                continue
            was_found = key in self._index
            leaving = self._reserve(put, now_s)
            if leaving is None:
                self._drop_queued(put, now_s)
                self._leave(put.entry, now_s)
                continue
            entries.append(put.entry)
            victims += leaving
            rewritten += [key] if was_found else []
        self._stats.evictions += len(victims)
        self._state.emit(self._index.name, stored=False, keys=[*victims, *rewritten])
        return entries, victims

    def _is_wanted(self, put: _Put) -> bool:
        return put.is_wanted and put.number >= self._first_wanted

    def _drop_queued(self, put: _Put, now_s: float) -> None:
        if self._is_wanted(put):
            self._drop(put.entry, put.tries, now_s)
        else:
            self._stats.put_drops += 1

    def _reserve(self, put: _Put, now_s: float) -> list[bytes] | None:
        # A hidden entry may be written all the same: clearing the cpu tier alone does not stop
        # puts to the disk.
        if not self._is_wanted(put) or self._backoff.is_on(now_s):
            return None
        if now_s >= self._grow_at_s:
            self._index.restore_limit()
        return self._index.reserve(put.entry.key)

    def end(
        self, entries: Sequence[PoolEntry], outcomes: Sequence[PutOutcome], now_s: float
    ) -> None:
        """Note how the writes of reserved chunks ended."""
        self._moved_s = now_s
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is PutOutcome.STORED:
                self._stored(entry)
            else:
                self._failed(entry, outcome, now_s)
            self._leave(entry, now_s)
        self.retry(now_s)

    def _stored(self, entry: PoolEntry) -> None:
        self._backoff.succeeded()
        if self._index.publish(entry.key):
            self._stats.puts += 1
            self._stats.put_bytes += self._state.chunk_bytes
            self._state.gained(self._index, [entry.key])
        else:
            # Cleared while it was written.
            self._stats.put_drops += 1
            self._state.delete(self._index, [entry.key])

    def _failed(self, entry: PoolEntry, outcome: PutOutcome, now_s: float) -> None:
        put = self._by_key[entry.key]
        if outcome is not PutOutcome.NOT_TRIED:
            put.tries += 1
            self._stats.io_errors += 1
        self._drop_queued(put, now_s)
        if not self._index.not_written(entry.key):
            self._state.delete(self._index, [entry.key])
        elif entry.key in self._index:
            self._state.gained(self._index, [entry.key])
        self._grow_at_s = now_s + LONGEST_BACKOFF_S
        is_full = outcome is PutOutcome.NO_SPACE
        self._backoff.failed(now_s, grows=is_full or not self._index.has_breaker)
        if is_full:
            # Continue within what did fit: one chunk leaves for each that comes.
            self._index.limit_to_used()

    def _leave(self, entry: PoolEntry, now_s: float) -> None:
        del self._by_key[entry.key]
        self._state.pool.end_put(entry)
        self._state.remove_if_unwanted(entry, now_s)

    def cancel(self, keys: Collection[bytes] | None = None) -> None:
        """Have queued puts dropped, of all chunks or of these, when their turn comes."""
        if keys is None:
            self._state.dropped[self._queue_name] = OrderedDict()
            self._lost = OrderedDict()
            self._first_wanted = self._next_number
            return
        for key in keys:
            self._dropped.pop(key, None)
            self._lost.pop(key, None)
            put = self._by_key.get(key)
            if put is not None:
                put.is_wanted = False

    def deleted(self, keys: Collection[bytes]) -> None:
        """Note that chunks given out for deletion are gone from the tier."""
        for key in keys:
            self._index.forget(key)

    def has(self, key: bytes) -> bool:
        return key in self._by_key

    def check(self) -> None:
        assert len(self._dropped) <= _MOST_DROPPED and len(self._lost) <= _MOST_LOST
        assert not self._lost.keys() & (self._dropped.keys() | self._by_key.keys())
        assert not self._dropped.keys() & self._by_key.keys(), "both dropped and queued"
        assert len(self._waiting) <= len(self._by_key) <= self._max_queued
        for put in self._waiting:
            assert self._by_key[put.entry.key] is put
        for key, put in self._by_key.items():
            assert self._state.pool.get(key) is put.entry, "a put of a chunk that left the pool"
