"""Every decision of the engine: which chunk is where, who may use it, what moves next.

Pure: no I/O, no clock, no threads. The engine serializes calls, passes the
time in, and afterwards does what `Residency.take_todo` says.
"""

from collections.abc import Collection, Iterable, Sequence

from cacheengine.decisions import Presence, StoreReservation, Todo
from cacheengine.index import Entry, State
from cacheengine.ledger import CPU, Ledger
from cacheengine.promotion import Outcome, Promotion
from cacheengine.promotions import Promotions
from cacheengine.puts import Puts


class Residency:
    """Lookups, holds, stores and clearing; and, in ``puts`` and ``promotions``, the moves."""

    def __init__(self, ledger: Ledger, *, max_queued_puts: int) -> None:
        self.ledger = ledger
        self.cpu = ledger.cpu
        self.tier = ledger.tier
        self.stats = ledger.stats
        self.events = ledger.events
        self.puts = Puts(ledger, max_queued_puts)
        self.promotions = Promotions(ledger)

    def take_todo(self) -> Todo:
        """Return what has come up since the last call."""
        return self.ledger.take_todo()

    # --- what is where ---

    def presence(self, key: bytes) -> Presence:
        """Say where a chunk is. Counts as a lookup, changes nothing else."""
        presence = self._presence(key)
        stats = self.stats
        stats.lookups += 1
        stats.hits_cpu += presence is Presence.CPU
        stats.hits_pending += presence is Presence.PENDING
        stats.hits_disk += presence is Presence.DISK
        return presence

    def _presence(self, key: bytes) -> Presence:
        entry = self.cpu.get(key)
        if entry is None:
            return Presence.DISK if key in self.tier else Presence.MISS
        if entry.condemned:
            return Presence.MISS
        return Presence.CPU if entry.state is State.READY else Presence.PENDING

    def match(self, keys: Iterable[bytes]) -> list[str]:
        """Return the tier of each chunk from the first up to the first that is nowhere."""
        tiers = []
        for key in keys:
            if self.cpu.ready(key) is not None:
                tiers.append(CPU)
            elif key in self.tier:
                tiers.append(self.ledger.tier_name)
            else:
                break
        return tiers

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use in every tier; of a prefix, the first chunk becomes the most recent.

        What comes later in a prefix is worth nothing without what comes
        before, so it must be evicted first.
        """
        self.cpu.touch(reversed(keys))
        for key in reversed(keys):
            self.tier.touch(key)

    # --- holds ---

    def hold(self, keys: Sequence[bytes], *, held_before: bool = False) -> list[int]:
        """Keep ready chunks until `release`; ends their pins. KeyError: none was held.

        With ``held_before`` the caller holds them already: then one that was
        cleared since is as good as a ready one.
        """
        entries = []
        for key in keys:
            entry = self.cpu.get(key)
            if entry is None or not (entry.is_usable or (held_before and entry.holds)):
                raise KeyError(f"chunk {key.hex()} is not ready in the cpu tier")
            entries.append(entry)
        for entry in entries:
            entry.holds += 1
            entry.prefetched = False
            self.cpu.unpin(entry)
        return [entry.slot for entry in entries]

    def try_hold(self, key: bytes) -> int | None:
        """Keep a chunk if it is ready; its pin stays."""
        entry = self.cpu.ready(key)
        if entry is None:
            return None
        self.stats.lookups += 1
        self.stats.hits_cpu += 1
        entry.holds += 1
        return entry.slot

    def release(self, keys: Iterable[bytes], now_s: float) -> None:
        """End one hold of each; KeyError on a chunk that is not held."""
        for key in keys:
            entry = self.cpu.get(key)
            if entry is None or entry.holds == 0:
                raise KeyError(f"chunk {key.hex()} is not held")
            entry.holds -= 1
            self.ledger.drop_if_unwanted(entry, now_s)

    # --- stores ---

    def prepare_store(self, keys: Sequence[bytes], now_s: float) -> StoreReservation | None:
        """Reserve slots for those chunks that are not there; None when there is no room."""
        wanted = [key for key in dict.fromkeys(keys) if self._is_storable(key)]
        # More than the pool could ever hold: keep the beginning of the prefix.
        del wanted[self.cpu.num_slots :]
        evicted = self.ledger.make_room(len(wanted), set(keys), now_s)
        if evicted is None:
            self.stats.store_drops += len(wanted)
            return None
        slots = tuple(self.cpu.add(key, State.STORING).slot for key in wanted)
        return StoreReservation(tuple(wanted), slots, tuple(evicted))

    def _is_storable(self, key: bytes) -> bool:
        if self.cpu.get(key) is not None:
            return False
        return self.ledger.keep_in_cpu or key not in self.tier

    def complete_store(self, keys: Iterable[bytes], now_s: float, *, success: bool) -> None:
        """Make reserved chunks visible and queue their puts, or give the slots back.

        Raises KeyError, changing nothing, for a chunk without a reservation.
        """
        entries = [self._storing(key) for key in dict.fromkeys(keys)]
        whole = [entry for entry in entries if success and not entry.condemned]
        # Backwards, so that the first of a prefix is the most recent.
        for entry in reversed(whole):
            self.cpu.publish(entry, now_s)
            self.ledger.settle(entry.key, Outcome.RESIDENT)
        self.stats.stores += len(whole)
        self.stats.store_bytes += len(whole) * self.ledger.chunk_bytes
        self.ledger.emit(CPU, stored=True, keys=[entry.key for entry in whole])
        for entry in entries:
            if entry.state is State.READY:
                self.puts.queue(entry, now_s)
                self.ledger.drop_if_unwanted(entry, now_s)
            else:
                self.stats.store_failures += 1
                self.cpu.remove(entry)
                self.ledger.settle(entry.key, Outcome.MISSING)

    def _storing(self, key: bytes) -> Entry:
        entry = self.cpu.get(key)
        if entry is None or entry.state is not State.STORING:
            raise KeyError(f"chunk {key.hex()} is not being stored")
        return entry

    # --- promotion, pins, clearing ---

    def promote(self, keys: Sequence[bytes], pin_s: float, now_s: float) -> Promotion:
        """Bring a prefix into the pool (see `Promotions.begin`)."""
        # First of all, so that what is wanted leaves the front of the order,
        # where room is looked for.
        self.touch(keys)
        return self.promotions.begin(keys, pin_s, now_s)

    def expire_pins(self, now_s: float) -> int:
        """Take off the pins whose deadline has passed; return how many."""
        expired = self.cpu.expired_pins(now_s)
        for entry in expired:
            self.ledger.expire(entry)
            self.ledger.drop_if_unwanted(entry, now_s)
        return len(expired)

    def clear(self, tiers: Collection[str]) -> dict[str, int]:
        """Hide everything in these tiers; return how many chunks could be found until now.

        Pins end. Bytes in use, being written or read stay where they are until
        that is over, and cannot be found any more.
        """
        dropped = {}
        if CPU in tiers:
            dropped[CPU] = self._clear_cpu()
        if self.ledger.tier_name in tiers:
            dropped[self.ledger.tier_name] = self._clear_tier()
        return dropped

    def _clear_cpu(self) -> int:
        ready = self.cpu.ready_keys()
        for entry in list(self.cpu):
            if not entry.condemned:
                self.ledger.condemn(entry)
        self.ledger.emit(CPU, stored=False, keys=ready)
        return len(ready)

    def _clear_tier(self) -> int:
        for entry in self.cpu:
            entry.put_wanted = False
        readable, idle = self.tier.clear()
        self.ledger.todo.deletes.extend(idle)
        self.ledger.emit(self.ledger.tier_name, stored=False, keys=readable)
        return len(readable)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self.ledger.check()
        self.puts.check()
