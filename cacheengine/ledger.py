"""The state that all of the engine's decisions share, and the steps they have in common.

Pure bookkeeping, like everything that works on it: `residency`, `puts`,
`promotions`.
"""

from collections.abc import Collection, Sequence
from typing import Final

from cacheengine.decisions import Todo
from cacheengine.events import EventLog
from cacheengine.index import CpuIndex, Entry, State
from cacheengine.promotion import Outcome, Promotion
from cacheengine.stats import EngineStats
from cacheengine.tier_index import TierIndex

CPU: Final = "cpu"


class Ledger:
    """What the pool and the lower tier hold, who waits for what, and what is to be done.

    ``keep_in_cpu`` is LMCache's ``local_cpu``: without it a chunk leaves the
    pool as soon as nobody uses or pins it and its put is over.
    """

    def __init__(
        self,
        cpu: CpuIndex,
        tier: TierIndex,
        *,
        tier_name: str,
        chunk_bytes: int,
        keep_in_cpu: bool = True,
    ) -> None:
        self.cpu = cpu
        self.tier = tier
        self.tier_name = tier_name
        self.chunk_bytes = chunk_bytes
        self.keep_in_cpu = keep_in_cpu
        self.events = EventLog()
        self.stats = EngineStats()
        self.todo = Todo()
        self.waiters: dict[bytes, list[Promotion]] = {}

    def take_todo(self) -> Todo:
        """Return what has come up since the last call."""
        todo, self.todo = self.todo, Todo()
        return todo

    def emit(self, tier: str, *, stored: bool, keys: Sequence[bytes]) -> None:
        """Log what a tier gained or lost; nothing if there are no keys."""
        if keys:
            self.events.append(tier, stored=stored, keys=tuple(keys))
            self.todo.has_news = True

    def settle(self, key: bytes, outcome: Outcome) -> None:
        """Tell the promotions that wait for a chunk how it ended."""
        for promotion in self.waiters.pop(key, ()):
            self.todo.settled.append((promotion, outcome, 1))

    def make_room(self, count: int, keep: Collection[bytes], now_s: float) -> list[bytes] | None:
        """Evict until so many slots are free; None, changing nothing, if that cannot be."""
        lacking = count - self.cpu.free_slots
        victims = self.cpu.victims(lacking, keep, now_s)
        if len(victims) < lacking:
            return None
        for entry in victims:
            if entry.pinned_until_s is not None:
                self.expire(entry)
            self._remove(entry)
        self.stats.evictions += len(victims)
        evicted = [entry.key for entry in victims]
        self.emit(CPU, stored=False, keys=evicted)
        return evicted

    def expire(self, entry: Entry) -> None:
        """Take off a pin whose deadline has passed."""
        self.cpu.unpin(entry)
        self.stats.pins_expired += 1

    def drop_if_unwanted(self, entry: Entry, now_s: float) -> None:
        """Free the slot of an unused chunk that was cleared, or is not to stay in the pool."""
        if entry.state is not State.READY or entry.holds or entry.putting:
            return
        if entry.condemned:
            self.cpu.remove(entry)
        elif not self.keep_in_cpu and not entry.is_pinned(now_s):
            self._remove(entry)
            self.emit(CPU, stored=False, keys=[entry.key])

    def condemn(self, entry: Entry) -> None:
        """Hide a chunk of the pool for good, and free its slot if nobody uses it."""
        self._count_unused(entry)
        self.cpu.condemn(entry)
        self.settle(entry.key, Outcome.MISSING)
        if entry.state is State.READY and entry.holds == 0 and not entry.putting:
            self.cpu.remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._count_unused(entry)
        self.cpu.remove(entry)

    def _count_unused(self, entry: Entry) -> None:
        if entry.prefetched:
            self.stats.prefetch_unused_bytes += self.chunk_bytes
            entry.prefetched = False

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self.cpu.check()
        self.tier.check()
        for key in self.waiters:
            entry = self.cpu.get(key)
            assert entry is not None and entry.state is not State.READY and not entry.condemned
