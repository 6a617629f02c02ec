"""Lookups, holds, stores, pins and clearing, over the state that all decisions share.

`CacheEngine` says what the calls promise. Pure: no I/O, no clock, no threads. The engine
serializes calls, passes the time in, and afterwards does the work of `CacheState.take_work`.
"""

from collections.abc import Collection, Container, Iterable, Sequence

from cacheengine.kept_pool import PoolSeals
from cacheengine.record import CPU, EngineStats
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import Presence, PromotionOutcome, StoreReservation
from cacheengine.residency.lower_index import LowerIndex
from cacheengine.residency.pool_index import EntryState, Holder, PoolEntry, PoolIndex
from cacheengine.residency.promotions import PrefixPromotions, Promoter
from cacheengine.residency.shared_index import SharedIndex
from cacheengine.residency.state import CacheState, ProtectedKeys


class Decider:
    """Decides for a pool of ``slots`` and the tiers below it, the nearest first.

    ``policy`` is one of `POLICY_NAMES`, ``local_cpu`` see `CacheState`. Chunks waiting to be put
    down take at most ``put_queue_share`` of the pool. ``cascades`` puts chunks down, ``promoter``
    and ``promotions`` bring them up.
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
        seals: PoolSeals | None = None,
    ) -> None:
        self.pool = PoolIndex(slots, policy, seals)
        self.state = CacheState(self.pool, lower, chunk_bytes=chunk_bytes, local_cpu=local_cpu)
        self.stats = self.state.stats
        self.events = self.state.events
        # Together they must leave the pool room: a chunk that is being put is not evicted.
        used = sum(len(index.queues) for index in lower if index.is_there)
        share = max(1, int(put_queue_share * slots) // max(1, used))
        self.cascades: dict[str, Cascade] = {
            queue: Cascade(self.state, index, share, queue)
            for index in lower
            for queue in index.queues
        }
        remotes = [index for index in lower if isinstance(index, SharedIndex)]
        self.promoter = Promoter(self.state, self.cascades)
        self.promotions = PrefixPromotions(
            self.state, self.promoter, remotes[0] if remotes else None
        )

    # --- lookups ---

    def presence(self, key: bytes, now_s: float) -> Presence:
        """Say where a chunk is; ask the remote tier for one that is nowhere. Counts a lookup."""
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
        entry = self.state.entry(key)
        if entry is not None:
            if self.pool.is_hidden(entry):
                return Presence.MISS
            return Presence.CPU if entry.state is EntryState.READY else Presence.PENDING
        source = self.state.source(key, now_s)
        if source is not None:
            return Presence.REMOTE if isinstance(source, SharedIndex) else Presence.DISK
        return Presence.UNKNOWN if self.promotions.ask(key, now_s) else Presence.MISS

    def match(self, keys: Sequence[bytes], now_s: float) -> list[str]:
        source = self.state.source
        tiers: list[str] = []
        for key, is_ready in zip(keys, self.pool.are_ready(keys), strict=True):
            if is_ready:
                tiers.append(CPU)
                continue
            index = source(key, now_s)
            if index is None:
                break
            tiers.append(index.name)
        return tiers

    def touch(self, keys: Sequence[bytes], now_s: float) -> None:
        """Note a use in every tier; the first chunk of a prefix becomes the most recent.

        A later chunk of a prefix is useless without the earlier ones, so it is evicted first.
        """
        self.pool.touch(reversed(keys))
        for index in self.state.lower:
            for key in reversed(keys):
                index.touch(key)
        self.promotions.renew(keys, now_s)

    # --- holds ---

    def hold(self, keys: Sequence[bytes], *, held_before: bool = False) -> list[int]:
        """Keep ready chunks until `release`, then `note_hold`. KeyError: none was held."""
        entries = []
        for key in keys:
            entry = self.pool.get(key)
            is_held = held_before and entry is not None and entry.holds > 0
            if entry is None or not (self.pool.is_ready(entry) or is_held):
                raise KeyError(f"chunk {key.hex()} is not ready in the cpu tier")
            entries.append(entry)
        for entry in entries:
            self.pool.hold(entry)
        return [entry.slot for entry in entries]

    def note_hold(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Note that held chunks are used: the holder's pins end, and one prefetch's of each."""
        for entry in filter(None, map(self.pool.get, keys)):
            entry.is_prefetched = False
            if holder is not None:
                self.pool.note_use(entry, holder)

    def try_hold(self, key: bytes) -> int | None:
        """Keep a chunk if it is ready; its pins stay."""
        entry = self.pool.ready(key)
        if entry is None:
            return None
        self.stats.lookups += 1
        self.stats.hits_cpu += 1
        self.pool.hold(entry)
        return entry.slot

    def release(self, keys: Iterable[bytes], now_s: float) -> None:
        for key in keys:
            entry = self.pool.get(key)
            if entry is None or entry.holds == 0:
                raise KeyError(f"chunk {key.hex()} is not held")
            self.pool.release(entry)
            self.state.remove_if_unwanted(entry, now_s)

    # --- stores: chunks from the GPU ---

    def protected(self, keys: Sequence[bytes], prefix: Collection[bytes]) -> ProtectedKeys:
        """Return the chunks that may not leave for ``keys``: these, and of their prefix the chunks
        that no lower tier has. To be used under the engine's lock only.
        """
        return ProtectedKeys(frozenset(keys), prefix, self.state.is_below)

    def prepare_store(
        self,
        keys: Sequence[bytes],
        now_s: float,
        protected: Container[bytes],
        *,
        is_refused: bool = False,
    ) -> StoreReservation:
        """Reserve slots for chunks that are not there, the leading ones that find room.

        ``is_refused``: a chunk before these has found none, so they get none.
        """
        wanted = [*filter(self._is_storable, keys)]
        most = 0 if is_refused else len(wanted)
        slots, evicted = self.state.make_room(most, protected, now_s)
        entries = [self.pool.add(key, EntryState.STORING) for key in wanted[:slots]]
        self.stats.store_drops += len(wanted) - slots
        return StoreReservation(
            tuple(entry.key for entry in entries),
            tuple(entry.slot for entry in entries),
            tuple(evicted),
            tuple(wanted[slots:]),
        )

    def _is_storable(self, key: bytes) -> bool:
        if self.state.entry(key) is not None:
            return False
        return self.state.local_cpu or not self.state.is_below(key)

    def check_stores(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._being_stored(key)

    def _being_stored(self, key: bytes) -> PoolEntry:
        entry = self.pool.get(key)
        if entry is None or entry.state is not EntryState.STORING:
            raise KeyError(f"chunk {key.hex()} is not being stored")
        return entry

    def end_stores(
        self, keys: Iterable[bytes], now_s: float, *, success: bool, prefetched: bool
    ) -> list[PoolEntry]:
        """Make reserved chunks visible, or free their slots; return the visible ones, held.

        `put_down` must follow for these.
        """
        entries = [self._being_stored(key) for key in keys]
        whole = self._end_filling(entries, now_s, are_whole=success)
        for entry in whole:
            entry.is_prefetched = prefetched
            self.pool.hold(entry)
        self.stats.stores += len(whole)
        self.stats.store_bytes += len(whole) * self.state.chunk_bytes
        self.stats.store_failures += len(entries) - len(whole)
        return whole

    def end_check(self, keys: Sequence[bytes], now_s: float, *, are_intact: bool) -> None:
        """Make chunks of an earlier run visible, or free their slots; the last is the most recent.

        A local tier that does not have them gets them: the earlier run may have ended before it
        wrote them. What a shared tier has is not known, and it is not written to.
        """
        entries = [self._being_stored(key) for key in reversed(keys)]
        whole = self._end_filling(entries, now_s, are_whole=are_intact)
        local = [index for index in self.state.lower if not isinstance(index, SharedIndex)]
        for entry in reversed(whole):
            for index in local:
                self.cascades[index.name].queue(entry, now_s)

    def _end_filling(
        self, entries: Sequence[PoolEntry], now_s: float, *, are_whole: bool
    ) -> list[PoolEntry]:
        # A chunk that was cleared while it was stored never becomes visible.
        whole = [entry for entry in entries if are_whole and not self.pool.is_hidden(entry)]
        # Backwards, so that the first chunk of a prefix is the most recent.
        for entry in reversed(whole):
            self.pool.publish(entry, now_s)
        published = [entry.key for entry in whole]
        self.state.settle(published, PromotionOutcome.RESIDENT)
        self.state.emit(CPU, stored=True, keys=published)
        for entry in entries:
            if entry.state is not EntryState.READY:
                self.pool.remove(entry)
                self.state.settle([entry.key], PromotionOutcome.MISSING)
        return whole

    def put_down(self, entries: Iterable[PoolEntry], now_s: float) -> None:
        """Queue the puts of chunks made visible, and release them."""
        for entry in entries:
            # It may have been cleared since it became visible.
            if not self.pool.is_hidden(entry):
                for index in self.state.lower:
                    self.cascades[index.queue_of(entry.key)].queue(entry, now_s)
            self.pool.release(entry)
            self.state.remove_if_unwanted(entry, now_s)

    # --- pins ---

    def may_promote(self, now_s: float) -> bool:
        return self.pool.may_pin(None) and self.state.has_room(now_s)

    def watch(self, now_s: float) -> bool:
        """Give up what waits for tiers that hang, a portion; have a tier that failed pinged.

        Returns whether there is more to give up.
        """
        self.promotions.watch(now_s)
        return self.promoter.watch(now_s) or any(
            each.watch(now_s) for each in self.cascades.values()
        )

    def expire_pins(self, now_s: float) -> tuple[int, bool]:
        """Take off pins whose deadline has passed, queue dropped puts again; a portion of each.

        Returns how many pins ended, and whether there are more.
        """
        for cascade in self.cascades.values():
            cascade.retry(now_s)
        return self.state.end_expired(now_s), bool(self.pool.expired_pins(now_s, 1))

    def leave(
        self, keys: Sequence[bytes], holder: str, now_s: float, *, keep_ready: bool = False
    ) -> None:
        self.promotions.leave(holder)
        # Backwards, so that the first chunk of a prefix is the most recent.
        for entry in filter(None, map(self.pool.get, reversed(keys))):
            if entry.state is not EntryState.READY:
                self.pool.end_pin(entry, holder)
                self.promoter.leave(entry, holder, now_s)
            elif not keep_ready:
                self.pool.end_pin(entry, holder)
                self.state.remove_if_unwanted(entry, now_s)

    def is_putting(self, keys: Iterable[bytes], tier: str) -> bool:
        """Whether one of these chunks is on its way into a lower tier."""
        index = self.state.below(tier)
        return index is not None and any(self.cascades[index.queue_of(k)].has(k) for k in keys)

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index:
                return count
        return len(keys)

    def operator_pin(self, keys: Sequence[bytes], tier: str) -> int:
        index = self._index(tier)
        for count, key in enumerate(keys):
            if index is None or key not in index or not index.operator_pin(key):
                return count
        return len(keys)

    def operator_unpin(self, keys: Sequence[bytes], tier: str, now_s: float) -> int:
        index = self._index(tier)
        if index is None:
            return 0
        # Backwards, so that the first chunk of a prefix is the most recent.
        unpinned = sum(map(index.operator_unpin, reversed(keys)))
        if index is self.pool:
            for entry in filter(None, map(self.pool.ready, keys)):
                self.state.remove_if_unwanted(entry, now_s)
        return unpinned

    def _index(self, tier: str) -> PoolIndex | LowerIndex | None:
        return self.pool if tier == CPU else self.state.below(tier)

    # --- clearing ---

    def clear(
        self,
        tiers: Collection[str] | None,
        keys: Collection[bytes] | None = None,
        *,
        keep_shared: bool = False,
    ) -> dict[str, int]:
        """Hide everything in these tiers or all, or these chunks; return how many were found.

        ``keep_shared``: all chunks of a shared tier are forgotten instead, and not deleted.
        """
        dropped = {}
        if tiers is None or CPU in tiers:
            dropped[CPU] = self.state.clear_pool() if keys is None else self._clear_pool(keys)
        for index in self.state.lower:
            if tiers is None or index.name in tiers:
                for queue in index.queues:
                    self.cascades[queue].cancel(keys)
                is_kept = keep_shared and isinstance(index, SharedIndex)
                if keys is None or is_kept:
                    dropped[index.name] = self.state.clear_below(index, keep=is_kept)
                else:
                    dropped[index.name] = self._clear_below(index, keys)
        return dropped

    def _clear_pool(self, keys: Collection[bytes]) -> int:
        entries = [*filter(None, map(self.state.entry, dict.fromkeys(keys)))]
        found = [entry.key for entry in entries if self.pool.is_ready(entry)]
        for entry in entries:
            if not self.pool.is_hidden(entry):
                self.state.hide(entry)
        self.state.emit(CPU, stored=False, keys=found)
        return len(found)

    def _clear_below(self, index: LowerIndex, keys: Collection[bytes]) -> int:
        found = [key for key in dict.fromkeys(keys) if key in index]
        self.state.delete(index, index.hide(keys))
        self.state.emit(index.name, stored=False, keys=found)
        return len(found)

    # --- all there is ---

    def counts(self) -> EngineStats:
        """Return a copy of the counters, and the current sizes except ``cpu_held_bytes``."""
        stats = self.stats.copy()
        stats.events_dropped = self.events.untaken_dropped
        stats.cpu_used_bytes = len(self.pool) * self.state.chunk_bytes
        stats.put_queue_bytes = sum(cascade.queued_bytes for cascade in self.cascades.values())
        return stats

    def check(self) -> None:
        self.state.check()
        for cascade in self.cascades.values():
            cascade.check()
        self.promoter.check()
        self.promotions.check()
        for entry in self.pool:
            puts = sum(cascade.has(entry.key) for cascade in self.cascades.values())
            assert entry.putting == puts, "a put that nothing ends"
