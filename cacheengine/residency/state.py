"""The state that all of the engine's decisions share, and the steps they have in common. Pure."""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Final

from cacheengine.record import CPU, EngineStats, EventLog
from cacheengine.residency.decisions import PORTION, Outcome, Promotion, Todo
from cacheengine.residency.entry import Entry, State
from cacheengine.residency.lower import LowerIndex, RemoteIndex
from cacheengine.residency.pool_index import CpuIndex
from cacheengine.residency.shards import KnownKeys, TakenKeys

_AT_ONCE: Final = 1024
"""Keys of a tier that are told in one event, together, when all are lost."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an eviction has come to: so many of the slots asked for are free."""

    slots: int
    evicted: list[bytes]
    is_all: bool
    """Whether there can be no more now; else the search was cut short, and goes on if repeated."""


@dataclass(frozen=True, slots=True)
class Protected:
    """Chunks that are to be stored and the prefix they follow: not to leave for each other."""

    keys: Container[bytes]
    prefix: Container[bytes]
    is_below: Callable[[bytes], bool]
    """A chunk of the prefix may leave if a lower tier has it."""

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return key in self.keys or (key in self.prefix and not self.is_below(key))


class CacheState:
    """What the pool and the tiers below hold, the promotions that wait, and what is to be done.

    ``lower`` are the tiers below the pool, the nearest first. ``local_cpu``
    is LMCache's ``local_cpu``: without it a chunk leaves the pool as soon as
    it is neither used nor pinned and its puts are over.
    """

    def __init__(
        self,
        cpu: CpuIndex,
        lower: Sequence[LowerIndex],
        *,
        chunk_bytes: int,
        local_cpu: bool = True,
    ) -> None:
        self.cpu = cpu
        cpu.on_hidden = self._hidden
        self.lower = lower
        self.chunk_bytes = chunk_bytes
        self.local_cpu = local_cpu
        self.events = EventLog()
        self.stats = EngineStats()
        self._todo: Todo | None = None
        self.waiters: dict[bytes, list[Promotion]] = {}
        # By lower tier; of the pool followers know the ready entries.
        self._known: dict[str, KnownKeys] = {index.name: KnownKeys() for index in lower}
        for index in lower:
            self._known[index.name].add(index.keys())

    @property
    def todo(self) -> Todo:
        """What is to be done outside the lock, to add to."""
        if self._todo is None:
            self._todo = Todo()
        return self._todo

    def take_todo(self) -> Todo | None:
        """Return what has come up since the last call, None if nothing has."""
        todo, self._todo = self._todo, None
        return todo

    # --- what others are told ---

    def emit(self, tier: str, *, stored: bool, keys: Collection[bytes]) -> None:
        """Log what a tier gained or lost; nothing if there are no keys."""
        if not keys:
            return
        self.events.append(tier, stored=stored, keys=tuple(keys))
        self.todo.has_news = True
        if tier != CPU:
            known = self._known[tier]
            (known.add if stored else known.discard)(keys)

    def emit_cleared(self, tier: str, taken: Sequence[TakenKeys]) -> int:
        """Log that a tier has lost all its keys; return how many."""
        count = sum(map(len, taken))
        if count <= _AT_ONCE:
            taken_keys: list[Collection[bytes]] = [tuple(key for part in taken for key in part)]
        else:
            taken_keys = [part for part in taken if part]
        for keys in taken_keys if count else ():
            self.events.append(tier, stored=False, keys=keys)
            self.todo.has_news = True
        return count

    def clear_cpu(self) -> int:
        """Hide all that the pool holds; return how many chunks were found."""
        self.todo.clears.add(CPU)
        return self.emit_cleared(CPU, self.cpu.clear())

    def clear_below(self, index: LowerIndex) -> int:
        """Hide all that a lower tier holds; return how many chunks were found."""
        index.clear_all()
        return self._lost_all(index)

    def forget_below(self, index: RemoteIndex) -> int:
        """Know no more of what a shared tier holds; return of how many chunks."""
        index.forget_held()
        return self._lost_all(index)

    def _lost_all(self, index: LowerIndex) -> int:
        self.todo.clears.add(index.name)
        return self.emit_cleared(index.name, self._known[index.name].take())

    def listed_keys(self, tier: str, shard: int) -> tuple[list[bytes], int]:
        """Return some keys of a tier that followers know of, as `Shards.listed_keys` does."""
        return (self.cpu if tier == CPU else self._known[tier]).listed_keys(shard)

    def gained(self, index: LowerIndex, keys: Sequence[bytes]) -> None:
        """Log what a lower tier gained, and what had to be forgotten for that."""
        self.emit(index.name, stored=True, keys=keys)
        self.emit(index.name, stored=False, keys=index.take_forgotten())

    def settle(self, key: bytes, outcome: Outcome) -> None:
        """Tell the promotions that wait for a chunk how it ended."""
        for promotion in self.waiters.pop(key, ()):
            self.todo.settled.append((promotion, outcome, 1))

    def delete(self, index: LowerIndex, keys: Sequence[bytes]) -> None:
        """Have chunks deleted from a lower tier, then `Cascade.deleted`."""
        if keys:
            self.todo.deletes.setdefault(index.name, []).extend(keys)

    # --- operators' pins: they last until they are taken off or the chunks cleared ---

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Return how many leading chunks a tier is known to hold."""
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index:
                return count
        return len(keys)

    def operator_pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Pin leading chunks that a tier holds; return how many, fewer where too much is pinned."""
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index or not index.operator_pin(key):
                return count
        return len(keys)

    def operator_unpin(self, keys: Sequence[bytes], tier: str, now_s: float) -> int:
        """End the pins of chunks that a tier held; return how many had one."""
        index = self._index(tier)
        if index is None:
            return 0
        # Backwards, so that the first of a prefix is the most recent.
        unpinned = sum(map(index.operator_unpin, reversed(keys)))
        if tier == CPU:
            for entry in filter(None, map(self.cpu.ready, keys)):
                self.drop_if_unwanted(entry, now_s)
        return unpinned

    def _index(self, tier: str) -> CpuIndex | LowerIndex | None:
        if tier == CPU:
            return self.cpu
        return next((index for index in self.lower if index.name == tier), None)

    # --- room ---

    def make_room(self, count: int, protected: Container[bytes], now_s: float) -> Room:
        """Evict for so many free slots, or as many as can be found now."""
        lacking = count - self.cpu.free_slots
        if lacking > 0 and self.cpu.reap(lacking + PORTION) and count > self.cpu.free_slots:
            # What was cleared may have more slots to give: none need leave for them.
            return Room(self.cpu.free_slots, [], is_all=False)
        if count > self.cpu.free_slots:
            # First, so that what they kept leaves in its turn.
            self.end_expired(now_s, most=PORTION)
        lacking = count - self.cpu.free_slots
        victims, is_all = self.cpu.next_victims(lacking, protected, now_s)
        for entry in victims:
            if entry.seen.pinned_until_s is not None:
                self.expire(entry, now_s)
            self._remove(entry)
        self.stats.evictions += len(victims)
        evicted = [entry.key for entry in victims]
        self.emit(CPU, stored=False, keys=evicted)
        return Room(min(count, self.cpu.free_slots), evicted, is_all=is_all)

    def end_expired(self, now_s: float, most: int = PORTION) -> int:
        """Take off pins whose deadline has passed, of so many chunks; return how many pins."""
        ended = 0
        for entry in self.cpu.expired_pins(now_s, most):
            ended += self.expire(entry, now_s)
            self.drop_if_unwanted(entry, now_s)
        return ended

    def expire(self, entry: Entry, now_s: float) -> int:
        """Take off the pins whose deadline has passed; return how many."""
        ended = self.cpu.end_expired(entry, now_s)
        if entry.seen.pinned_until_s is None:
            self._count_unused(entry)
        self.stats.pins_expired += ended
        return ended

    def drop_if_unwanted(self, entry: Entry, now_s: float) -> None:
        """Free the slot of an unused chunk that was cleared, or is not to stay in the pool."""
        self.cpu.tidy(entry)
        if entry.state is not State.READY or entry.is_busy:
            return
        if entry.condemned:
            self.cpu.remove(entry)
        elif not self.local_cpu and not entry.is_pinned(now_s):
            self._remove(entry)
            self.emit(CPU, stored=False, keys=[entry.key])

    def condemn(self, entry: Entry) -> None:
        """Hide a chunk of the pool for good, and free its slot if it is unused."""
        self._count_unused(entry)
        self.cpu.condemn(entry)
        self.settle(entry.key, Outcome.MISSING)
        if entry.state is State.READY and not entry.is_busy:
            self.cpu.remove(entry)

    def _hidden(self, entry: Entry) -> None:
        self._count_unused(entry)
        self.settle(entry.key, Outcome.MISSING)

    def _remove(self, entry: Entry) -> None:
        self._count_unused(entry)
        self.cpu.remove(entry)

    def _count_unused(self, entry: Entry) -> None:
        if entry.seen.prefetched:
            self.stats.prefetch_unused_chunks += 1
            self.stats.prefetch_unused_bytes += self.chunk_bytes
            entry.in_use.prefetched = False

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self.cpu.check()
        for index in self.lower:
            index.check()
            told = {key for part in self._known[index.name].parts for key in part}
            assert told == {*index.keys()}, "not what was told"
        for key in self.waiters:
            entry = self.cpu.peek(key)
            assert entry is not None and entry.state is not State.READY and not entry.condemned
