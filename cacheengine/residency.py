"""Every decision of the engine: which chunk is where, who may use it, what moves next.

Pure: no I/O, no clock, no threads. The engine serializes calls, passes the
time in, and afterwards does what `Residency.take_todo` says.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cacheengine.decisions import Presence, StoreReservation, Todo
from cacheengine.events import EventLog
from cacheengine.index import CpuIndex, Entry, State
from cacheengine.promotion import Outcome, Promotion
from cacheengine.put_queue import PutQueue
from cacheengine.stats import EngineStats
from cacheengine.tier_index import TierIndex
from cacheengine.tiers.base import GetOutcome, PutOutcome

CPU: Final = "cpu"


class Residency:
    """The pool's index, the lower tier's, and the moves between them.

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
        max_queued_puts: int,
        events: EventLog | None = None,
    ) -> None:
        self.cpu = cpu
        self.tier = tier
        self.tier_name = tier_name
        self.events = events or EventLog()
        self.stats = EngineStats()
        self._chunk_bytes = chunk_bytes
        self._keep_in_cpu = keep_in_cpu
        self._puts = PutQueue(max_queued_puts)
        self._waiters: dict[bytes, list[Promotion]] = {}
        self._todo = Todo()

    def take_todo(self) -> Todo:
        """Return what has come up since the last call."""
        todo, self._todo = self._todo, Todo()
        return todo

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
                tiers.append(self.tier_name)
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

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Keep ready chunks until `release`; ends their pins. KeyError: none was held."""
        entries = []
        for key in keys:
            entry = self.cpu.ready(key)
            if entry is None:
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
            self._drop_if_unwanted(entry, now_s)

    # --- stores ---

    def prepare_store(self, keys: Sequence[bytes], now_s: float) -> StoreReservation | None:
        """Reserve slots for those chunks that are not there; None when there is no room."""
        wanted = [key for key in dict.fromkeys(keys) if self._is_storable(key)]
        # More than the pool could ever hold: keep the beginning of the prefix.
        del wanted[self.cpu.num_slots :]
        evicted = self._make_room(len(wanted), set(keys), now_s)
        if evicted is None:
            self.stats.store_drops += len(wanted)
            return None
        slots = tuple(self.cpu.add(key, State.STORING).slot for key in wanted)
        return StoreReservation(tuple(wanted), slots, tuple(evicted))

    def _is_storable(self, key: bytes) -> bool:
        if self.cpu.get(key) is not None:
            return False
        return self._keep_in_cpu or key not in self.tier

    def complete_store(self, keys: Sequence[bytes], now_s: float, *, success: bool) -> None:
        """Make reserved chunks visible and queue their puts, or give the slots back.

        Raises KeyError, changing nothing, for a chunk without a reservation.
        """
        entries = [self._storing(key) for key in dict.fromkeys(keys)]
        stored = []
        # Backwards, so that the first of a prefix is the most recent.
        for entry in reversed(entries):
            if success and not entry.condemned:
                stored.append(entry)
                self._publish(entry, Outcome.RESIDENT, now_s)
            else:
                self.stats.store_failures += 1
                self.cpu.remove(entry)
                self._settle(entry.key, Outcome.MISSING)
        stored.reverse()
        self.stats.stores += len(stored)
        self.stats.store_bytes += len(stored) * self._chunk_bytes
        self._emit(CPU, stored=True, keys=[entry.key for entry in stored])
        for entry in stored:
            self._queue_put(entry, now_s)
            self._drop_if_unwanted(entry, now_s)

    def _storing(self, key: bytes) -> Entry:
        entry = self.cpu.get(key)
        if entry is None or entry.state is not State.STORING:
            raise KeyError(f"chunk {key.hex()} is not being stored")
        return entry

    # --- puts: cpu to the lower tier ---

    def _queue_put(self, entry: Entry, now_s: float) -> None:
        if not self.tier.capacity_bytes or self.tier.is_known(entry.key):
            return
        if not self._puts.enter(now_s):
            self.stats.put_drops += 1
            return
        entry.putting = True
        entry.put_wanted = True
        self._todo.puts.append(entry)

    def begin_put(self, entry: Entry, now_s: float) -> list[bytes] | None:
        """Reserve room below for a queued put.

        Returns the chunks to delete first (then `deleted`), and `end_put` must
        follow; or None: the put is dropped, and over.
        """
        victims = None
        # A condemned entry may be written all the same: clearing the cpu tier
        # alone leaves what is on its way to the disk.
        if entry.put_wanted and not self._puts.is_resting(now_s):
            if self._puts.may_grow(now_s):
                self.tier.restore_limit()
            victims = self.tier.reserve(entry.key)
        if victims is None:
            self.stats.put_drops += 1
            self._end_putting(entry, now_s)
            return None
        self.stats.disk_evictions += len(victims)
        self._emit(self.tier_name, stored=False, keys=victims)
        return victims

    def end_put(self, entry: Entry, outcome: PutOutcome, now_s: float) -> None:
        """Note how the write of a reserved chunk ended."""
        if outcome is PutOutcome.STORED:
            self._puts.succeeded()
            if self.tier.publish(entry.key):
                self.stats.puts += 1
                self.stats.put_bytes += self._chunk_bytes
                self._emit(self.tier_name, stored=True, keys=[entry.key])
            else:
                self.stats.put_drops += 1
                self._todo.deletes.append(entry.key)
        else:
            self.stats.put_drops += 1
            self.stats.io_errors += 1
            self.tier.forget(entry.key)
            self._puts.failed(now_s)
            if outcome is PutOutcome.NO_SPACE:
                # Go on within what did fit: one leaves for each that comes.
                self.tier.limit_to_used()
        self._end_putting(entry, now_s)

    def _end_putting(self, entry: Entry, now_s: float) -> None:
        entry.putting = False
        self._puts.leave()
        self._drop_if_unwanted(entry, now_s)

    def deleted(self, keys: Iterable[bytes]) -> None:
        """Note that chunks given out for deletion are gone from the lower tier."""
        for key in keys:
            self.tier.forget(key)

    # --- promotions: the lower tier to cpu ---

    def promote(self, keys: Sequence[bytes], pin_s: float, now_s: float) -> Promotion:
        """Pin what is ready, join what is under way, begin to read the rest, in order.

        Stops at the first chunk that is nowhere or finds no room.
        """
        self.stats.prefetches += 1
        promotion = Promotion(len(keys), self._chunk_bytes)
        # First of all, so that what is wanted leaves the front of the order,
        # where room is looked for.
        self.touch(keys)
        keep = set(keys)
        reached = 0
        for key in keys:
            if not self._promote(key, promotion, keep, pin_s, now_s):
                break
            reached += 1
        if reached < len(keys) or not keys:
            self._todo.settled.append((promotion, Outcome.MISSING, len(keys) - reached))
        return promotion

    def _promote(
        self, key: bytes, promotion: Promotion, keep: Collection[bytes], pin_s: float, now_s: float
    ) -> bool:
        entry = self.cpu.get(key) or self._begin_get(key, keep, now_s)
        if entry is None or entry.condemned:
            return False
        if entry.state is State.READY:
            if pin_s > 0:
                self.cpu.pin(entry, now_s + pin_s)
            self._todo.settled.append((promotion, Outcome.RESIDENT, 1))
        else:
            entry.pin_s = max(entry.pin_s, pin_s)
            self._waiters.setdefault(key, []).append(promotion)
        return True

    def _begin_get(self, key: bytes, keep: Collection[bytes], now_s: float) -> Entry | None:
        if key not in self.tier:
            return None
        if self._make_room(1, keep, now_s) is None:
            self.stats.promote_drops += 1
            return None
        entry = self.cpu.add(key, State.PROMOTING)
        self.tier.begin_read(key)
        self._todo.gets.append(entry)
        return entry

    def end_get(self, entry: Entry, outcome: GetOutcome, now_s: float) -> None:
        """Note how the read of a chunk ended: it is visible, or it was never there."""
        self._count_get(outcome)
        self._end_read(entry.key, intact=outcome is GetOutcome.OK)
        if entry.condemned or outcome is not GetOutcome.OK:
            self.cpu.remove(entry)
            self._settle(entry.key, Outcome.MISSING)
            return
        entry.prefetched = True
        self.stats.promoted += 1
        self.stats.promoted_bytes += self._chunk_bytes
        self._publish(entry, Outcome.PROMOTED, now_s)
        self._emit(CPU, stored=True, keys=[entry.key])
        self._drop_if_unwanted(entry, now_s)

    def _end_read(self, key: bytes, *, intact: bool) -> None:
        if not intact and key in self.tier:
            self._emit(self.tier_name, stored=False, keys=[key])
        if self.tier.end_read(key, intact=intact):
            if intact:
                # Cleared while it was read.
                self._todo.deletes.append(key)
            else:
                # Damaged files were removed by the tier. One that could not be
                # read is forgotten too, or every lookup would find it again.
                self.tier.forget(key)

    def _count_get(self, outcome: GetOutcome) -> None:
        match outcome:
            case GetOutcome.OK:
                self.stats.gets += 1
                self.stats.get_bytes += self._chunk_bytes
            case GetOutcome.MISSING:
                self.stats.get_misses += 1
            case GetOutcome.DAMAGED:
                self.stats.corrupt += 1
            case GetOutcome.FAILED:
                self.stats.io_errors += 1

    # --- leaving ---

    def expire_pins(self, now_s: float) -> int:
        """Take off the pins whose deadline has passed; return how many."""
        expired = self.cpu.expired_pins(now_s)
        for entry in expired:
            self._expire(entry)
            self._drop_if_unwanted(entry, now_s)
        return len(expired)

    def _expire(self, entry: Entry) -> None:
        self.cpu.unpin(entry)
        self.stats.pins_expired += 1

    def clear(self, tiers: Collection[str]) -> dict[str, int]:
        """Hide everything in these tiers; return how many chunks could be found until now.

        Pins end. Bytes in use, being written or read stay where they are until
        that is over, and cannot be found any more.
        """
        dropped = {}
        if CPU in tiers:
            dropped[CPU] = self._clear_cpu()
        if self.tier_name in tiers:
            dropped[self.tier_name] = self._clear_tier()
        return dropped

    def _clear_cpu(self) -> int:
        ready = self.cpu.ready_keys()
        for entry in list(self.cpu):
            if entry.condemned:
                continue
            self._count_unused(entry)
            self.cpu.condemn(entry)
            self._settle(entry.key, Outcome.MISSING)
            if entry.state is State.READY and entry.holds == 0 and not entry.putting:
                self.cpu.remove(entry)
        self._emit(CPU, stored=False, keys=ready)
        return len(ready)

    def _clear_tier(self) -> int:
        for entry in self.cpu:
            entry.put_wanted = False
        readable, idle = self.tier.clear()
        self._todo.deletes.extend(idle)
        self._emit(self.tier_name, stored=False, keys=readable)
        return len(readable)

    def _make_room(self, count: int, keep: Collection[bytes], now_s: float) -> list[bytes] | None:
        """Evict until so many slots are free; None, changing nothing, if that cannot be."""
        lacking = count - self.cpu.free_slots
        victims = self.cpu.victims(lacking, keep, now_s)
        if len(victims) < lacking:
            return None
        for entry in victims:
            if entry.pinned_until_s is not None:
                self._expire(entry)
            self._remove(entry)
        self.stats.evictions += len(victims)
        evicted = [entry.key for entry in victims]
        self._emit(CPU, stored=False, keys=evicted)
        return evicted

    def _drop_if_unwanted(self, entry: Entry, now_s: float) -> None:
        """Free the slot of an unused chunk that was cleared, or is not to stay in the pool."""
        if entry.state is not State.READY or entry.holds or entry.putting:
            return
        if entry.condemned:
            self.cpu.remove(entry)
        elif not self._keep_in_cpu and not entry.is_pinned(now_s):
            self._remove(entry)
            self._emit(CPU, stored=False, keys=[entry.key])

    def _remove(self, entry: Entry) -> None:
        self._count_unused(entry)
        self.cpu.remove(entry)

    def _count_unused(self, entry: Entry) -> None:
        if entry.prefetched:
            self.stats.prefetch_unused_bytes += self._chunk_bytes
            entry.prefetched = False

    @property
    def put_queue_bytes(self) -> int:
        """Bytes whose put is queued or under way."""
        return self._puts.length * self._chunk_bytes

    # --- shared steps ---

    def _publish(self, entry: Entry, outcome: Outcome, now_s: float) -> None:
        self.cpu.publish(entry, now_s)
        self._settle(entry.key, outcome)

    def _settle(self, key: bytes, outcome: Outcome) -> None:
        for promotion in self._waiters.pop(key, ()):
            self._todo.settled.append((promotion, outcome, 1))

    def _emit(self, tier: str, *, stored: bool, keys: Sequence[bytes]) -> None:
        if keys:
            self.events.append(tier, stored=stored, keys=tuple(keys))
            self._todo.has_news = True

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self.cpu.check()
        self.tier.check()
        assert self._puts.length == sum(entry.putting for entry in self.cpu)
        self._puts.check()
        for key in self._waiters:
            entry = self.cpu.get(key)
            assert entry is not None and entry.state is not State.READY and not entry.condemned
