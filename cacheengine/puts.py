"""The way down: which chunks are written to the lower tier, and when not. Pure."""

from cacheengine.index import Entry
from cacheengine.ledger import Ledger
from cacheengine.put_queue import PutQueue
from cacheengine.tiers.base import PutOutcome


class Puts:
    """Puts from being queued to their end, at most ``max_queued`` at once.

    An entry whose put is queued or under way is not evicted.
    """

    def __init__(self, ledger: Ledger, max_queued: int) -> None:
        self._ledger = ledger
        self._queue = PutQueue(max_queued)

    @property
    def queued_bytes(self) -> int:
        """Bytes whose put is queued or under way."""
        return self._queue.length * self._ledger.chunk_bytes

    def queue(self, entry: Entry, now_s: float) -> None:
        """Queue the put of a stored chunk, unless it is below already or must be dropped."""
        ledger = self._ledger
        if not ledger.tier.capacity_bytes or ledger.tier.is_known(entry.key):
            return
        if not self._queue.enter(now_s):
            ledger.stats.put_drops += 1
            return
        entry.putting = True
        entry.put_wanted = True
        ledger.todo.puts.append(entry)

    def begin(self, entry: Entry, now_s: float) -> list[bytes] | None:
        """Reserve room below for a queued put.

        Returns the chunks to delete first (then `deleted`), and `end` must
        follow; or None: the put is dropped, and over.
        """
        ledger = self._ledger
        victims = None
        # A condemned entry may be written all the same: clearing the cpu tier
        # alone leaves what is on its way to the disk.
        if entry.put_wanted and not self._queue.is_resting(now_s):
            if self._queue.may_grow(now_s):
                ledger.tier.restore_limit()
            victims = ledger.tier.reserve(entry.key)
        if victims is None:
            ledger.stats.put_drops += 1
            self._leave(entry, now_s)
            return None
        ledger.stats.disk_evictions += len(victims)
        ledger.emit(ledger.tier_name, stored=False, keys=victims)
        return victims

    def end(self, entry: Entry, outcome: PutOutcome, now_s: float) -> None:
        """Note how the write of a reserved chunk ended."""
        if outcome is PutOutcome.STORED:
            self._stored(entry)
        else:
            self._failed(entry, outcome, now_s)
        self._leave(entry, now_s)

    def _stored(self, entry: Entry) -> None:
        ledger = self._ledger
        self._queue.succeeded()
        if ledger.tier.publish(entry.key):
            ledger.stats.puts += 1
            ledger.stats.put_bytes += ledger.chunk_bytes
            ledger.emit(ledger.tier_name, stored=True, keys=[entry.key])
        else:
            # Cleared while it was written.
            ledger.stats.put_drops += 1
            ledger.todo.deletes.append(entry.key)

    def _failed(self, entry: Entry, outcome: PutOutcome, now_s: float) -> None:
        ledger = self._ledger
        ledger.stats.put_drops += 1
        ledger.stats.io_errors += 1
        ledger.tier.forget(entry.key)
        self._queue.failed(now_s)
        if outcome is PutOutcome.NO_SPACE:
            # Go on within what did fit: one leaves for each that comes.
            ledger.tier.limit_to_used()

    def _leave(self, entry: Entry, now_s: float) -> None:
        entry.putting = False
        self._queue.leave()
        self._ledger.drop_if_unwanted(entry, now_s)

    def deleted(self, keys: list[bytes]) -> None:
        """Note that chunks given out for deletion are gone from the lower tier."""
        for key in keys:
            self._ledger.tier.forget(key)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self._queue.check()
        assert self._queue.length == sum(entry.putting for entry in self._ledger.cpu)
