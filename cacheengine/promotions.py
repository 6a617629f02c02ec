"""The way up: which chunks are read from the lower tier into the pool. Pure."""

from collections.abc import Collection, Sequence

from cacheengine.index import Entry, State
from cacheengine.ledger import CPU, Ledger
from cacheengine.promotion import Outcome, Promotion
from cacheengine.tiers.base import GetOutcome


class Promotions:
    """Promotions from being asked for to the end of their reads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def begin(self, keys: Sequence[bytes], pin_s: float, now_s: float) -> Promotion:
        """Pin what is ready, join what is under way, begin to read the rest, in order.

        Stops at the first chunk that is nowhere or finds no room.
        """
        ledger = self._ledger
        ledger.stats.prefetches += 1
        promotion = Promotion(len(keys), ledger.chunk_bytes)
        keep = set(keys)
        for position, key in enumerate(keys):
            if not self._promote(key, promotion, keep, pin_s, now_s):
                rest = len(keys) - position
                ledger.todo.settled.append((promotion, Outcome.MISSING, rest))
                break
        return promotion

    def _promote(
        self, key: bytes, promotion: Promotion, keep: Collection[bytes], pin_s: float, now_s: float
    ) -> bool:
        ledger = self._ledger
        entry = ledger.cpu.get(key) or self._begin_get(key, keep, now_s)
        if entry is None or entry.condemned:
            return False
        if entry.state is State.READY:
            if pin_s > 0:
                ledger.cpu.pin(entry, now_s + pin_s)
            ledger.todo.settled.append((promotion, Outcome.RESIDENT, 1))
        else:
            entry.pin_s = max(entry.pin_s, pin_s)
            ledger.waiters.setdefault(key, []).append(promotion)
        return True

    def _begin_get(self, key: bytes, keep: Collection[bytes], now_s: float) -> Entry | None:
        ledger = self._ledger
        if key not in ledger.tier:
            return None
        if ledger.make_room(1, keep, now_s) is None:
            ledger.stats.promote_drops += 1
            return None
        entry = ledger.cpu.add(key, State.PROMOTING)
        ledger.tier.begin_read(key)
        ledger.todo.gets.append(entry)
        return entry

    def end(self, entry: Entry, outcome: GetOutcome, now_s: float) -> None:
        """Note how the read of a chunk ended: it is visible, or it was never there."""
        ledger = self._ledger
        self._count(outcome)
        self._end_read(entry.key, outcome)
        if entry.condemned or outcome is not GetOutcome.OK:
            ledger.cpu.remove(entry)
            ledger.settle(entry.key, Outcome.MISSING)
            return
        entry.prefetched = True
        ledger.stats.promoted += 1
        ledger.stats.promoted_bytes += ledger.chunk_bytes
        ledger.cpu.publish(entry, now_s)
        ledger.settle(entry.key, Outcome.PROMOTED)
        ledger.emit(CPU, stored=True, keys=[entry.key])
        ledger.drop_if_unwanted(entry, now_s)

    def _end_read(self, key: bytes, outcome: GetOutcome) -> None:
        ledger = self._ledger
        intact = outcome is GetOutcome.OK
        if not intact and key in ledger.tier:
            ledger.emit(ledger.tier_name, stored=False, keys=[key])
        if ledger.tier.end_read(key, intact=intact):
            if outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED):
                # It is gone: the tier removes what is damaged.
                ledger.tier.forget(key)
            else:
                # Cleared while it was read; or it could not be read. Kept, the
                # latter would be found by every lookup again; forgotten but not
                # deleted, it would take room that nobody counts.
                ledger.todo.deletes.append(key)

    def _count(self, outcome: GetOutcome) -> None:
        stats = self._ledger.stats
        match outcome:
            case GetOutcome.OK:
                stats.gets += 1
                stats.get_bytes += self._ledger.chunk_bytes
            case GetOutcome.MISSING:
                stats.get_misses += 1
            case GetOutcome.DAMAGED:
                stats.corrupt += 1
            case GetOutcome.FAILED:
                stats.io_errors += 1
