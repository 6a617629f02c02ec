"""Chunks that come from the GPU: slots for them, then their puts to the tiers below. Pure."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from cacheengine.record import CPU
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decisions import Outcome, StoreReservation
from cacheengine.residency.entry import Entry, State
from cacheengine.residency.state import CacheState, Protected


class Stores:
    """Stores from the reservation of their slots to the queueing of their puts."""

    def __init__(self, state: CacheState, cascades: Mapping[str, Cascade]) -> None:
        self._state = state
        self._cascades = cascades

    def protected(self, keys: Sequence[bytes], prefix: Collection[bytes]) -> Protected:
        """Return what must not make room for chunks: themselves, and of their prefix what is lost.

        To be looked into under the engine's lock only.
        """
        return Protected(frozenset(keys), prefix, self._is_below)

    def prepare(
        self, keys: Sequence[bytes], now_s: float, protected: Container[bytes]
    ) -> StoreReservation:
        """Reserve slots for chunks that are not there, the leading ones that find room."""
        wanted = [key for key in keys if self._is_storable(key)]
        room = self._state.make_room(len(wanted), protected, now_s)
        taken, left = tuple(wanted[: room.slots]), tuple(wanted[room.slots :])
        slots = tuple(self._state.cpu.add(key, State.STORING).slot for key in taken)
        evicted = tuple(room.evicted)
        if left and not room.is_all:
            return StoreReservation(taken, slots, evicted, next_key=left[0])
        self._state.stats.store_drops += len(left)
        return StoreReservation(taken, slots, evicted, left)

    def refuse(self, keys: Sequence[bytes]) -> StoreReservation:
        """Reserve nothing: one before these has found no room."""
        refused = tuple(key for key in keys if self._is_storable(key))
        self._state.stats.store_drops += len(refused)
        return StoreReservation((), (), (), refused)

    def _is_storable(self, key: bytes) -> bool:
        if self._state.cpu.get(key) is not None:
            return False
        return self._state.local_cpu or not self._is_below(key)

    def _is_below(self, key: bytes) -> bool:
        return any(key in index and not index.must_rewrite(key) for index in self._state.lower)

    def check(self, keys: Iterable[bytes]) -> None:
        """Raise KeyError unless each of these is being stored."""
        for key in keys:
            self._storing(key)

    def end(
        self, keys: Iterable[bytes], now_s: float, *, success: bool, prefetched: bool
    ) -> list[Entry]:
        """Make reserved chunks visible, or give the slots back; return the visible ones, held.

        `put` must follow.
        """
        entries = [self._storing(key) for key in keys]
        whole = [entry for entry in entries if success and not entry.condemned]
        # Backwards, so that the first of a prefix is the most recent.
        for entry in reversed(whole):
            entry.in_use.prefetched = prefetched
            self._state.cpu.publish(entry, now_s)
            entry.in_use.holds += 1
            self._state.settle(entry.key, Outcome.RESIDENT)
        self._state.stats.stores += len(whole)
        self._state.stats.store_bytes += len(whole) * self._state.chunk_bytes
        self._state.emit(CPU, stored=True, keys=[entry.key for entry in whole])
        for entry in entries:
            if entry.state is not State.READY:
                self._state.stats.store_failures += 1
                self._state.cpu.remove(entry)
                self._state.settle(entry.key, Outcome.MISSING)
        return whole

    def put(self, entries: Iterable[Entry], now_s: float) -> None:
        """Queue the puts of chunks made visible, and let go of them."""
        for entry in entries:
            self._state.cpu.meet(entry.key)  # if the pool was cleared, the entry is condemned now
            if not entry.condemned:
                for cascade in self._cascades.values():
                    cascade.queue(entry, now_s)
            entry.in_use.holds -= 1
            self._state.drop_if_unwanted(entry, now_s)

    def _storing(self, key: bytes) -> Entry:
        entry = self._state.cpu.get(key)
        if entry is None or entry.state is not State.STORING:
            raise KeyError(f"chunk {key.hex()} is not being stored")
        return entry
