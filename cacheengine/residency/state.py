"""The state that all of the engine's decisions share, and the steps they have in common. Pure."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cacheengine.record import CPU, EngineStats, EventLog
from cacheengine.residency.decisions import PORTION, PendingWork, Promotion, PromotionOutcome
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import EntryState, PoolEntry, PoolIndex

SHARDS: Final = 256
"""Tables: with a million keys each has four thousand, which are listed in 0.1 ms."""
_LISTED: Final = 1024
"""Keys after which a list ends with the table that it has come to."""
_KEYS_AN_EVENT: Final = 1024
"""Lost keys that are reported together in one event, when a tier loses all."""


class ReportedKeys:
    """The keys of a tier that were reported as stored and not as removed since.

    They lie in many small tables: one can be listed without holding the engine's lock for long,
    and all can be taken in one step.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.parts: tuple[dict[bytes, None], ...] = ()
        self.take()
        for key in keys:
            self.add(key)

    def add(self, key: bytes) -> None:
        self.parts[hash(key) % SHARDS][key] = None

    def discard(self, key: bytes) -> bool:
        """Note that the tier has lost a key; return whether it was reported."""
        part = self.parts[hash(key) % SHARDS]
        if key not in part:
            return False
        del part[key]
        return True

    def take(self) -> list[Collection[bytes]]:
        """Return all keys in parts that do not change any more, and have none, in one step."""
        taken: list[Collection[bytes]] = [part.keys() for part in self.parts if part]
        self.parts = tuple({} for _ in range(SHARDS))
        return taken

    def listed(self, first: int) -> tuple[list[bytes], int]:
        """Return the keys of the tables from number ``first`` on, and where to continue.

        Returns all keys if they are few, one table's if they are many. `SHARDS`: that was all.
        """
        listed: list[bytes] = []
        while first < SHARDS and len(listed) < _LISTED:
            listed += self.parts[first]
            first += 1
        return listed, first


@dataclass(frozen=True, slots=True)
class ProtectedKeys:
    """Chunks to be stored and the prefix that they follow: they do not leave for each other."""

    keys: Container[bytes]
    prefix: Container[bytes]
    is_below: Callable[[bytes], bool]
    """A chunk of the prefix may leave if a lower tier has it."""

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return key in self.keys or (key in self.prefix and not self.is_below(key))


class CacheState:
    """What the pool and the tiers below hold, the promotions that wait, and the pending work.

    ``lower`` are the tiers below the pool, the nearest first. ``local_cpu`` is LMCache's
    ``local_cpu``: without it a chunk leaves the pool as soon as it is neither used nor pinned, its
    puts have ended and none is to be tried again.
    """

    def __init__(
        self,
        pool: PoolIndex,
        lower: Sequence[LowerIndex],
        *,
        chunk_bytes: int,
        local_cpu: bool = True,
    ) -> None:
        self.pool = pool
        self.lower = lower
        self.chunk_bytes = chunk_bytes
        self.local_cpu = local_cpu
        self.events = EventLog()
        self.stats = EngineStats()
        self.dropped: dict[str, OrderedDict[bytes, int]] = {}
        """By queue: chunks whose dropped put will be tried again, the first dropped at the front,
        and how often it was tried."""
        self.waiters: dict[bytes, list[Promotion]] = {}
        """Promotions by the chunk that they wait for, which is on its way into the pool."""
        self._work: PendingWork | None = None
        self.reported: dict[str, ReportedKeys] = {
            index.name: ReportedKeys(index.keys()) for index in lower
        }
        self.reported[CPU] = ReportedKeys()
        # Of tiers that were cleared whole: keys whose chunks may still be there, hidden.
        self._cleared: dict[str, deque[Iterator[bytes]]] = {tier: deque() for tier in self.reported}

    @property
    def work(self) -> PendingWork:
        """The work to do outside the lock, to add to."""
        if self._work is None:
            self._work = PendingWork()
        return self._work

    def take_work(self) -> PendingWork | None:
        """Return the work added since the last call; None if there is none."""
        work, self._work = self._work, None
        return work

    def below(self, tier: str) -> LowerIndex | None:
        """Return the index of a lower tier by its name."""
        return next((index for index in self.lower if index.name == tier), None)

    def source(self, key: bytes, now_s: float) -> LowerIndex | None:
        """Return the nearest lower tier that a chunk can be read from."""
        for index in self.lower:
            if index.can_read(key, now_s):
                return index
        return None

    def is_below(self, key: bytes) -> bool:
        """Whether a lower tier has a chunk and need not be given it again."""
        return any(key in index and not index.must_rewrite(key) for index in self.lower)

    # --- events ---

    def emit(self, tier: str, *, stored: bool, keys: Collection[bytes]) -> None:
        """Log which keys a tier gained, or lost; of these the ones that it had gained."""
        reported = self.reported[tier]
        if stored:
            for key in keys:
                reported.add(key)
        else:
            keys = [*filter(reported.discard, keys)]
        if keys:
            self.events.append(tier, stored=stored, keys=tuple(keys))
            self.work.has_events = True

    def gained(self, index: LowerIndex, keys: Sequence[bytes]) -> None:
        """Log what a lower tier gained, and what had to be forgotten for that."""
        self.emit(index.name, stored=True, keys=keys)
        self.emit(index.name, stored=False, keys=index.take_forgotten())

    def settle(self, keys: Iterable[bytes], outcome: PromotionOutcome) -> None:
        """End the wait of all promotions for chunks."""
        ended: Counter[Promotion] = Counter()
        for key in keys:
            for promotion in self.waiters.pop(key, ()):
                ended[promotion] += 1
        for promotion, chunks in ended.items():
            self.work.settled.append((promotion, outcome, chunks))

    # --- clearing a whole tier ---

    def clear_pool(self) -> int:
        """Hide everything in the pool; return how many chunks could be found."""
        self.pool.hide_all()
        self.settle([*self.waiters], PromotionOutcome.MISSING)
        count = self._lost_all(CPU)
        # A small pool is empty at once.
        self.remove_cleared(PORTION)
        return count

    def clear_below(self, index: LowerIndex, *, keep: bool) -> int:
        """Hide everything in a lower tier; return how many chunks could be found.

        ``keep``: the index forgets its chunks, and they stay in the tier.
        """
        if keep:
            index.forget_all()
        else:
            index.hide_all()
        return self._lost_all(index.name)

    def _lost_all(self, tier: str) -> int:
        """Log that a tier has lost all keys, and have their chunks removed in the background."""
        parts = self.reported[tier].take()
        count = sum(map(len, parts))
        if 0 < count <= _KEYS_AN_EVENT:
            self.events.append(
                tier, stored=False, keys=tuple(key for part in parts for key in part)
            )
        elif count:
            for part in parts:
                self.events.append(tier, stored=False, keys=part)
        if count:
            self.work.has_events = True
            self._cleared[tier] += map(iter, parts)
            self.work.clears.add(tier)
        return count

    def _take_cleared(self, tier: str, most: int) -> tuple[list[bytes], bool]:
        """Return some keys that a tier had when it was cleared, and whether there are more."""
        waiting = self._cleared[tier]
        taken: list[bytes] = []
        while waiting and len(taken) < most:
            lacking = most - len(taken)
            part = [*islice(waiting[0], lacking)]
            taken += part
            if len(part) < lacking:
                waiting.popleft()
        return taken, bool(waiting)

    def remove_cleared(self, most: int) -> bool:
        """Free slots of a cleared pool, of at most ``most`` chunks; return whether to continue."""
        keys, is_more = self._take_cleared(CPU, most)
        for key in keys:
            self.entry(key)
        return is_more

    def take_cleared(self, index: LowerIndex, most: int) -> tuple[list[bytes], bool]:
        """Return chunks of a cleared tier to delete, and whether to continue.

        At most ``most`` chunks are looked at. One that is read or written is deleted after that.
        `Cascade.deleted` must follow.
        """
        keys, is_more = self._take_cleared(index.name, most)
        return index.take_hidden(keys), is_more

    def delete(self, index: LowerIndex, keys: Sequence[bytes]) -> None:
        """Have chunks deleted from a lower tier, then `Cascade.deleted`."""
        for key in keys:
            self.work.deletes.setdefault(index.queue_of(key), []).append(key)

    # --- the pool's entries ---

    def entry(self, key: bytes) -> PoolEntry | None:
        """Return the pool's entry of a key, hidden or not.

        A hidden one that is not in use any more is removed first: nothing else has met it since
        the pool was cleared.
        """
        entry = self.pool.get(key)
        if entry is None or not self.pool.is_hidden(entry):
            return entry
        if entry.state is not EntryState.READY or entry.is_busy:
            return entry
        self.remove(entry)
        return None

    def remove(self, entry: PoolEntry) -> None:
        """Forget a chunk of the pool, and free its slot."""
        self._count_unused(entry)
        self.pool.remove(entry)

    def hide(self, entry: PoolEntry) -> None:
        """Clear a chunk of the pool, and free its slot if it is not in use."""
        self._count_unused(entry)
        self.pool.hide(entry)
        self.settle([entry.key], PromotionOutcome.MISSING)
        if entry.state is EntryState.READY and not entry.is_busy:
            self.pool.remove(entry)

    def remove_if_unwanted(self, entry: PoolEntry, now_s: float) -> None:
        """Free the slot of an unused chunk that was cleared, or does not stay in the pool."""
        if entry.state is not EntryState.READY or entry.is_busy:
            return
        if self.pool.is_hidden(entry):
            self.remove(entry)
        elif not self.local_cpu and not entry.is_pinned(now_s):
            if any(entry.key in dropped for dropped in self.dropped.values()):
                return
            self.remove(entry)
            self.emit(CPU, stored=False, keys=[entry.key])

    def _count_unused(self, entry: PoolEntry) -> None:
        if entry.is_prefetched:
            self.stats.prefetch_unused_chunks += 1
            self.stats.prefetch_unused_bytes += self.chunk_bytes
            entry.is_prefetched = False

    # --- room ---

    def make_room(
        self, count: int, protected: Container[bytes], now_s: float
    ) -> tuple[int, list[bytes]]:
        """Evict until ``count`` slots are free, or no more can be.

        Returns how many of the slots asked for are free, and which chunks left.
        """
        while self.pool.free_slots < count and self.remove_cleared(PORTION):
            pass  # nothing needs to leave while a cleared pool has slots to give
        evicted: list[bytes] = []
        is_more = True
        while (lacking := count - self.pool.free_slots) > 0 and is_more:
            # First, so that what expired pins kept leaves in its turn.
            is_more = self.end_expired(now_s) > 0
            victims = self.pool.victims(lacking, protected)
            for entry in victims:
                self.remove(entry)
            evicted += [entry.key for entry in victims]
        self.stats.evictions += len(evicted)
        self.emit(CPU, stored=False, keys=evicted)
        return min(count, self.pool.free_slots), evicted

    def has_room(self, now_s: float) -> bool:
        """Whether a slot is free, or could be."""
        while not self.pool.free_slots and self.remove_cleared(PORTION):
            pass
        if self.pool.free_slots:
            return True
        self.end_expired(now_s)
        return bool(self.pool.victims(1, ()))

    def end_expired(self, now_s: float, most: int = PORTION) -> int:
        """Take off pins whose deadline has passed, of at most ``most`` chunks; return how many."""
        ended = 0
        # Backwards, so that the first chunk of a prefix is the most recent.
        for entry in reversed(self.pool.expired_pins(now_s, most)):
            ended += self.pool.end_expired(entry, now_s)
            if not entry.leases:
                self._count_unused(entry)
            self.remove_if_unwanted(entry, now_s)
        self.stats.pins_expired += ended
        return ended

    def check(self) -> None:
        self.pool.check()
        for index in self.lower:
            index.check()
        found = {CPU: {*self.pool.ready_keys()}}
        found |= {index.name: {*index.keys()} for index in self.lower}
        for tier, reported in self.reported.items():
            keys = {key for part in reported.parts for key in part}
            assert keys == found[tier], f"{tier}: not what was reported"
        for key in self.waiters:
            waited_for = self.pool.get(key)
            assert waited_for is not None and waited_for.state is not EntryState.READY
            assert not self.pool.is_hidden(waited_for)
