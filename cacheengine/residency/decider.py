"""Lookups, holds, stores and clearing, over the state that all decisions share.

`CacheEngine` says what the calls promise. Pure: no I/O, no clock, no threads. The engine
serializes calls, passes the time in, and afterwards does what `Decider.take_todo` says.
"""

from collections.abc import Collection, Iterable, Sequence

from cacheengine.record import CPU, EngineStats
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import PORTION, Presence, Todo
from cacheengine.residency.entry import Holder, State
from cacheengine.residency.lower import LowerIndex, RemoteIndex
from cacheengine.residency.pool_index import CpuIndex
from cacheengine.residency.promoter import Promoter
from cacheengine.residency.state import CacheState
from cacheengine.residency.stores import Stores
from cacheengine.residency.walks import Walks


class Decider:
    """Lookups, holds, stores and clearing for a pool of ``slots`` and the tiers below it.

    ``policy`` is one of `POLICY_NAMES`, ``local_cpu`` see `CacheState`; chunks waiting
    to be written down take at most ``put_queue_share`` of the pool.
    """

    def __init__(
        self,
        slots: int,
        policy: str,
        lower: Sequence[LowerIndex],
        *,
        chunk_bytes: int,
        local_cpu: bool,
        put_queue_share: float,
    ) -> None:
        self.cpu = CpuIndex(slots, policy)
        self.state = state = CacheState(
            self.cpu, lower, chunk_bytes=chunk_bytes, local_cpu=local_cpu
        )
        self.stats = state.stats
        self.events = state.events
        # Together they must leave the pool room: what is being put is not evicted.
        used = sum(index.is_there for index in lower)
        share = max(1, int(put_queue_share * slots) // max(1, used))
        self.cascades: dict[str, Cascade] = {
            index.name: Cascade(state, index, share) for index in lower
        }
        remotes = [index for index in lower if isinstance(index, RemoteIndex)]
        self.stores = Stores(state, self.cascades)
        self.promoter = Promoter(state, self.cascades)
        self.walks = Walks(state, self.promoter, remotes[0] if remotes else None)

    def take_todo(self) -> Todo | None:
        """Return what has come up since the last call, None if nothing has."""
        return self.state.take_todo()

    # --- what is where ---

    def presence(self, key: bytes, now_s: float) -> Presence:
        """Say where a chunk is; ask the remote tier for one that is nowhere. A lookup."""
        presence = self._presence(key, now_s)
        stats = self.stats
        stats.lookups += 1
        match presence:
            case Presence.CPU:
                stats.hits_cpu += 1
            case Presence.PENDING:
                stats.hits_pending += 1
            case Presence.DISK:
                stats.hits_disk += 1
            case Presence.REMOTE:
                stats.hits_remote += 1
            case Presence.UNKNOWN:
                stats.lookups_unknown += 1
        return presence

    def _presence(self, key: bytes, now_s: float) -> Presence:
        entry = self.cpu.get(key)
        if entry is not None:
            if entry.condemned:
                return Presence.MISS
            return Presence.CPU if entry.state is State.READY else Presence.PENDING
        source = self.promoter.source(key, now_s)
        if source is not None:
            return Presence.REMOTE if isinstance(source, RemoteIndex) else Presence.DISK
        return Presence.UNKNOWN if self.walks.ask(key, now_s) else Presence.MISS

    def match(self, keys: Sequence[bytes], now_s: float) -> list[str]:
        """Return the tier of each chunk from the first up to the first that is nowhere."""
        source = self.promoter.source
        tiers: list[str] = []
        for key, is_ready in zip(keys, self.cpu.are_ready(keys), strict=True):
            if is_ready:
                tiers.append(CPU)
                continue
            index = source(key, now_s)
            if index is None:
                break
            tiers.append(index.name)
        return tiers

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use in every tier; of a prefix, the first chunk becomes the most recent.

        What comes later in a prefix is worth nothing without what comes
        before, so it must be evicted first.
        """
        self.cpu.touch(reversed(keys))
        for index in self.state.lower:
            for key in reversed(keys):
                index.touch(key)

    # --- holds ---

    def hold(self, keys: Sequence[bytes], *, held_before: bool = False) -> list[int]:
        """Keep ready chunks until `release`, then `note_hold`. KeyError: none was held."""
        entries = []
        for key in keys:
            entry = self.cpu.get(key)
            is_held = held_before and entry is not None and entry.seen.holds > 0
            if entry is None or not (entry.is_usable or is_held):
                raise KeyError(f"chunk {key.hex()} is not ready in the cpu tier")
            entries.append(entry)
        for entry in entries:
            entry.in_use.holds += 1
        return [entry.slot for entry in entries]

    def note_hold(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Note that chunks held are of use: the holder's pins end."""
        for entry in filter(None, map(self.cpu.get, keys)):
            entry.in_use.prefetched = False
            if holder is not None:
                self.cpu.end_pin(entry, holder)

    def try_hold(self, key: bytes) -> int | None:
        """Keep a chunk if it is ready; its pins stay."""
        entry = self.cpu.ready(key)
        if entry is None:
            return None
        self.stats.lookups += 1
        self.stats.hits_cpu += 1
        entry.in_use.holds += 1
        return entry.slot

    def release(self, keys: Iterable[bytes], now_s: float) -> None:
        """End one hold of each; KeyError on a chunk that is not held."""
        for key in keys:
            entry = self.cpu.get(key)
            if entry is None or entry.seen.holds == 0:
                raise KeyError(f"chunk {key.hex()} is not held")
            entry.in_use.holds -= 1
            self.state.drop_if_unwanted(entry, now_s)

    # --- pins, clearing ---

    def expire_pins(self, now_s: float) -> tuple[int, bool]:
        """Take off pins whose deadline has passed, and retry dropped puts, of a portion each.

        Returns how many pins ended, and whether there are more.
        """
        for cascade in self.cascades.values():
            cascade.retry(now_s)
        return self.state.end_expired(now_s), bool(self.cpu.expired_pins(now_s, 1))

    def may_promote(self, now_s: float) -> bool:
        """Whether a chunk from below would find room now, as far as a portion's search tells."""
        has_room = self.cpu.free_slots > 0 or bool(self.cpu.next_victims(1, (), now_s)[0])
        return has_room and self.cpu.may_pin(None)

    def end_pins(self, keys: Iterable[bytes], holder: Holder, now_s: float) -> None:
        """End one holder's pins of chunks."""
        for entry in filter(None, map(self.cpu.get, keys)):
            self.cpu.end_pin(entry, holder)
            self.state.drop_if_unwanted(entry, now_s)

    def clear(
        self,
        tiers: Collection[str] | None,
        keys: Collection[bytes] | None = None,
        *,
        keep_shared: bool = False,
    ) -> dict[str, int]:
        """Hide everything in these tiers or all, or these chunks; return how many were found.

        ``keep_shared``: a shared tier's chunks are forgotten, not deleted.
        """
        keys = None if keys is None else set(keys)
        dropped = {}
        if tiers is None or CPU in tiers:
            dropped[CPU] = self._clear_cpu(keys)
        for index in self.state.lower:
            if tiers is None or index.name in tiers:
                self.cascades[index.name].cancel(keys)
                if keep_shared and isinstance(index, RemoteIndex):
                    dropped[index.name] = self.state.forget_below(index)
                elif keys is None:
                    dropped[index.name] = self.state.clear_below(index)
                else:
                    readable, idle = index.clear(keys)
                    self.state.delete(index, idle)
                    self.state.emit(index.name, stored=False, keys=readable)
                    dropped[index.name] = len(readable)
        return dropped

    def free_cleared(self) -> bool:
        """Free a portion of the slots of a pool that was cleared; return whether there are more."""
        is_more = self.cpu.reap(PORTION)
        if self.cpu.emptied:
            self.state.todo.emptied += self.cpu.emptied
            self.cpu.emptied.clear()
        return is_more

    def take_cleared(self, tier: str) -> tuple[list[bytes], bool]:
        """Return a portion of what a lower tier is to delete of what was cleared, and if more is.

        Then `Cascade.deleted`.
        """
        index = next(each for each in self.state.lower if each.name == tier)
        return index.take_cleared(PORTION)

    def _clear_cpu(self, keys: Collection[bytes] | None) -> int:
        if keys is None:
            count = self.state.clear_cpu()
            # Of few, all are free at once.
            self.cpu.reap(PORTION)
            return count
        entries = [*filter(None, map(self.cpu.get, keys))]
        ready = [entry.key for entry in entries if entry.is_usable]
        for entry in entries:
            if not entry.condemned:
                self.state.condemn(entry)
        self.state.emit(CPU, stored=False, keys=ready)
        return len(ready)

    def counts(self) -> EngineStats:
        """Return a copy of the counters, and what is so now (but for ``cpu_held_bytes``)."""
        stats = self.stats.copy()
        stats.events_dropped = self.events.untaken_dropped
        stats.cpu_used_bytes = len(self.cpu) * self.state.chunk_bytes
        stats.put_queue_bytes = sum(cascade.queued_bytes for cascade in self.cascades.values())
        return stats

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self.state.check()
        for cascade in self.cascades.values():
            cascade.check()
        self.promoter.check()
        self.walks.check()
        for entry in self.cpu:
            puts_queued = sum(cascade.has(entry.key) for cascade in self.cascades.values())
            assert entry.seen.putting == puts_queued
