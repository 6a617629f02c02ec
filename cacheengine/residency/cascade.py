"""The way down: which chunks are written to a lower tier, and when not. Pure."""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from cacheengine.residency.decisions import PORTION
from cacheengine.residency.entry import Entry
from cacheengine.residency.lower import LowerIndex
from cacheengine.residency.state import CacheState
from cacheengine.tiers import LONGEST_BACKOFF_S, PutOutcome, TierBackoff

_TRIES: Final = 3
"""Writes of one chunk before it is given up."""
_MOST_DROPPED: Final = 16_384
"""Chunks remembered whose put was dropped; the oldest are given up."""


@dataclass(slots=True, eq=False)
class _Put:
    entry: Entry
    number: int
    tries: int = 0
    is_wanted: bool = True


class Cascade:
    """One tier's puts from being queued to their end, at most ``max_queued`` at once.

    An entry whose put is queued or under way is not evicted. After a failure
    the tier is left alone for a while; after the last one the longest backoff
    must pass before it may use its whole capacity again. A put that is dropped
    is tried again while its chunk is in the pool (`retry`), one that failed a
    few times in all.
    """

    def __init__(self, state: CacheState, index: LowerIndex, max_queued: int) -> None:
        self._state = state
        self._index = index
        self._stats = state.stats.below(index.name)
        self._max_queued = max_queued
        self._backoff = TierBackoff()
        self._grow_at_s = float("-inf")
        self._waiting: deque[_Put] = deque()
        self._by_key: dict[bytes, _Put] = {}  # puts under way included
        # By how often they were tried, those dropped first at the front.
        self._dropped: OrderedDict[bytes, int] = OrderedDict()
        self._next_number = 0
        self._first_wanted = 0  # those before it were cancelled, all at once

    @property
    def queued_bytes(self) -> int:
        """Bytes whose put is queued or under way."""
        return len(self._by_key) * self._state.chunk_bytes

    @property
    def waiting(self) -> int:
        """How many puts have not begun."""
        return len(self._waiting)

    def queue(self, entry: Entry, now_s: float) -> None:
        """Queue the put of a chunk of the pool, unless it is below already or must be dropped."""
        if not self._index.is_there or self._is_below(entry.key):
            return
        if self._can_queue(now_s):
            self._queue(entry, self._dropped.pop(entry.key, 0))
        else:
            self._drop(entry, self._dropped.get(entry.key, 0))

    def _is_below(self, key: bytes) -> bool:
        is_queued = key in self._by_key
        return is_queued or (self._index.is_known(key) and not self._index.must_rewrite(key))

    def _can_queue(self, now_s: float) -> bool:
        return not self._backoff.is_on(now_s) and len(self._by_key) < self._max_queued

    def _queue(self, entry: Entry, tries: int) -> None:
        entry.in_use.putting += 1
        put = _Put(entry, self._next_number, tries)
        self._next_number += 1
        self._waiting.append(put)
        self._by_key[entry.key] = put
        self._state.todo.puts[self._index.name] += 1

    def _drop(self, entry: Entry, tries: int) -> None:
        self._stats.put_drops += 1
        if tries < _TRIES:
            self._dropped[entry.key] = tries
        if len(self._dropped) > _MOST_DROPPED:
            self._dropped.popitem(last=False)

    def retry(self, now_s: float) -> None:
        """Queue puts that were dropped, some of as many as may be, of chunks still in the pool."""
        for _ in range(PORTION):
            if not self._dropped or not self._can_queue(now_s):
                return
            key, tries = self._dropped.popitem(last=False)
            entry = self._state.cpu.ready(key)
            if entry is not None and not self._is_below(key):
                self._stats.put_retries += 1
                self._queue(entry, tries)

    def begin(self, most: int, now_s: float) -> tuple[list[Entry], list[bytes]]:
        """Reserve room below for queued puts, the oldest first, at most so many.

        Returns the entries to write, for each of which `end` must follow, and
        the chunks to delete first (then `deleted`). Puts that must be dropped
        are over. No entries, and some still waiting: so many were dropped.
        """
        entries: list[Entry] = []
        victims: list[bytes] = []
        hidden: list[bytes] = []  # not to be found while they are written anew
        for _ in range(most + PORTION):
            if not self._waiting or len(entries) == most:
                break
            put = self._waiting.popleft()
            key = put.entry.key
            if self._index.is_known(key) and not self._index.must_rewrite(key):
                # A shared tier was asked for it since, and has it from others.
                self._leave(put.entry, now_s)
                continue
            was_found = key in self._index
            leaving = self._reserve(put, now_s)
            if leaving is None:
                self._drop_queued(put)
                self._leave(put.entry, now_s)
                continue
            entries.append(put.entry)
            victims += leaving
            hidden += [key] if was_found else []
        self._stats.evictions += len(victims)
        self._state.emit(self._index.name, stored=False, keys=[*victims, *hidden])
        return entries, victims

    def _is_wanted(self, put: _Put) -> bool:
        return put.is_wanted and put.number >= self._first_wanted

    def _drop_queued(self, put: _Put) -> None:
        if self._is_wanted(put):
            self._drop(put.entry, put.tries)
        else:
            self._stats.put_drops += 1

    def _reserve(self, put: _Put, now_s: float) -> list[bytes] | None:
        # A condemned entry may be written all the same: clearing the cpu tier
        # alone leaves what is on its way to the disk.
        if not self._is_wanted(put) or self._backoff.is_on(now_s):
            return None
        if now_s >= self._grow_at_s:
            self._index.restore_limit()
        return self._index.reserve(put.entry.key)

    def end(self, entries: Sequence[Entry], outcomes: Sequence[PutOutcome], now_s: float) -> None:
        """Note how the writes of reserved chunks ended."""
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is PutOutcome.STORED:
                self._stored(entry)
            else:
                self._failed(entry, outcome, now_s)
            self._leave(entry, now_s)
        self.retry(now_s)

    def _stored(self, entry: Entry) -> None:
        self._backoff.succeeded()
        if self._index.publish(entry.key):
            self._stats.puts += 1
            self._stats.put_bytes += self._state.chunk_bytes
            self._state.gained(self._index, [entry.key])
        else:
            # Cleared while it was written.
            self._stats.put_drops += 1
            self._state.delete(self._index, [entry.key])

    def _failed(self, entry: Entry, outcome: PutOutcome, now_s: float) -> None:
        put = self._by_key[entry.key]
        if outcome is not PutOutcome.NOT_TRIED:
            put.tries += 1
            self._stats.io_errors += 1
        self._drop_queued(put)
        if not self._index.not_written(entry.key):
            self._state.delete(self._index, [entry.key])
        elif entry.key in self._index:
            self._state.gained(self._index, [entry.key])
        self._grow_at_s = now_s + LONGEST_BACKOFF_S
        is_full = outcome is PutOutcome.NO_SPACE
        self._backoff.failed(now_s, grows=is_full or not self._index.has_breaker)
        if is_full:
            # Go on within what did fit: one leaves for each that comes.
            self._index.limit_to_used()

    def _leave(self, entry: Entry, now_s: float) -> None:
        self._state.cpu.meet(entry.key)  # if the pool was cleared, the entry is condemned now
        del self._by_key[entry.key]
        entry.in_use.putting -= 1
        self._state.drop_if_unwanted(entry, now_s)

    def cancel(self, keys: Collection[bytes] | None = None) -> None:
        """Drop queued puts, of all chunks or of these, when their turn comes."""
        if keys is None:
            self._dropped = OrderedDict()
            self._first_wanted = self._next_number
            return
        for key in keys:
            self._dropped.pop(key, None)
            put = self._by_key.get(key)
            if put is not None:
                put.is_wanted = False

    def deleted(self, keys: Collection[bytes]) -> None:
        """Note that chunks given out for deletion are gone from the tier."""
        for key in keys:
            self._index.forget(key)

    def has(self, key: bytes) -> bool:
        """Whether a put of this chunk is queued or under way."""
        return key in self._by_key

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert len(self._dropped) <= _MOST_DROPPED
        assert not self._dropped.keys() & self._by_key.keys(), "both dropped and queued"
        assert len(self._waiting) <= len(self._by_key) <= self._max_queued
        for put in self._waiting:
            assert self._by_key[put.entry.key] is put
        for key, put in self._by_key.items():
            assert self._state.cpu.peek(key) is put.entry, "a put of what has left the pool"
