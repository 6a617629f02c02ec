"""Counters and measured rates of the engine, and the log of keys that tiers gained and lost.

`EngineStats` and `TransferStats` define every counter. `EventLog` keeps the last events with
their numbers, for the agent's callers and vLLM's stream, and detects that some were missed. The
caller serializes calls, except those of `TransferMeter`.
"""

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Final

from warmroute_common import agent_protocol as wire
from warmroute_common.keys import key64

CPU: Final = "cpu"
"""The name of the first tier: the pool."""


def counter(meaning: str) -> int:
    """Return a dataclass field that counts from 0; ``/metrics`` shows ``meaning`` as its help."""
    return field(default=0, metadata={"meaning": meaning, "kind": "counter"})


def gauge(meaning: str) -> int:
    """Return a dataclass field for a current value."""
    return field(default=0, metadata={"meaning": meaning, "kind": "gauge"})


@dataclass(slots=True)
class TierStats:
    """Counts of one lower tier, or of all together; bytes are payload bytes."""

    puts: int = counter("Chunks written to lower tiers.")
    put_bytes: int = counter("Bytes written to lower tiers.")
    put_drops: int = counter(
        "Puts dropped: queue or tier full, tier paused after an error, or cleared; each time."
    )
    put_retries: int = counter("Puts that were dropped, and queued again later.")
    gets: int = counter("Chunks read whole from lower tiers.")
    get_bytes: int = counter("Bytes read from lower tiers.")
    get_misses: int = counter("Chunks that a lower tier was believed to hold and did not.")
    corrupt: int = counter("Chunks found damaged on reading, and removed.")
    io_errors: int = counter("Reads and writes that failed otherwise (no space, no answer, ...).")
    evictions: int = counter("Chunks evicted from a lower tier to make room.")
    asked: int = counter("Chunks that a shared tier was asked for.")
    found: int = counter("Chunks asked for that a shared tier held.")
    unanswered: int = counter("Chunks that a shared tier was asked for and gave no answer.")


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine's start; bytes are payload bytes."""

    lookups: int = counter(
        "Chunks looked up, including those that were held at once because they were ready."
    )
    hits_cpu: int = counter("Lookups that found the chunk ready in the CPU pool.")
    hits_pending: int = counter("Lookups that found the chunk being stored or promoted.")
    hits_disk: int = counter("Lookups that found the chunk on disk, and not in the CPU pool.")
    hits_remote: int = counter("Lookups that found the chunk in the remote tier only.")
    lookups_unknown: int = counter("Lookups while the remote tier was being asked.")
    stores: int = counter("Chunks stored from the GPU.")
    store_bytes: int = counter("Bytes stored from the GPU.")
    store_drops: int = counter("Chunks not stored, because there was no room.")
    store_failures: int = counter("Chunks whose store failed, or was cleared while under way.")
    evictions: int = counter("Chunks evicted from the CPU pool to make room.")
    prefetches: int = counter("Calls to promote.")
    promoted: int = counter("Chunks promoted to the CPU pool.")
    promoted_bytes: int = counter("Bytes promoted to the CPU pool.")
    promote_drops: int = counter(
        "Chunks not promoted, because there was no room or too much was pinned."
    )
    prefetch_unused_chunks: int = counter(
        "Chunks promoted or copied here that were not used while pinned (without a pin: until "
        "they left the pool)."
    )
    prefetch_unused_bytes: int = counter("Bytes of those.")
    pins_expired: int = counter("Pins that lasted until their deadline.")
    events_dropped: int = counter("Events that vLLM's stream lost, not taken in time.")
    cpu_used_bytes: int = gauge("Bytes in the CPU pool, including chunks on their way into it.")
    cpu_held_bytes: int = gauge("Bytes in the CPU pool that cannot be evicted now.")
    put_queue_bytes: int = gauge(
        "Bytes whose write to a lower tier is queued or under way, counted once for each tier."
    )
    disk: TierStats = field(default_factory=TierStats)
    remote: TierStats = field(default_factory=TierStats)

    @property
    def lower_tiers(self) -> TierStats:
        """The counts of disk and remote tier together."""
        names = [each.name for each in fields(TierStats)]
        return TierStats(*(getattr(self.disk, n) + getattr(self.remote, n) for n in names))

    def below(self, tier: str) -> TierStats:
        """Return the counts of a lower tier by its name."""
        return self.remote if tier == "remote" else self.disk

    def copy(self) -> "EngineStats":
        return replace(self, disk=replace(self.disk), remote=replace(self.remote))


@dataclass(slots=True)
class TransferStats:
    """Counts since the replica's start; bytes are payload bytes."""

    sent_chunks: int = counter("Chunks sent to other replicas.")
    sent_bytes: int = counter("Bytes sent to other replicas.")
    send_missing: int = counter("Chunks that another replica asked for and could not be read here.")
    send_refused: int = counter("Connections refused: another layout or version, too many.")
    send_failures: int = counter(
        "Connections of other replicas that broke or violated the protocol."
    )
    received_chunks: int = counter("Chunks fetched completely from other replicas.")
    received_bytes: int = counter("Bytes fetched from other replicas.")
    receive_corrupt: int = counter("Chunks that arrived damaged and were not kept.")
    receive_failures: int = counter("Connections to other replicas that were refused or broke.")
    moves: int = counter("Moves into this replica that were begun.")
    moves_failed: int = counter(
        "Moves of which not all arrived, or the source did not drop what it was to lose."
    )


class TransferMeter:
    """One replica's `TransferStats`, added to by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()

    def add(self, name: str, count: int = 1) -> None:
        """Add to the counter of that name."""
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + count)

    def stats(self) -> TransferStats:
        with self._lock:
            return replace(self._stats)


_WINDOW_S: Final = 2.0


class BandwidthMeter:
    """Bytes per second of busy time, recent operations counting more.

    Operations overlap (several I/O threads): time is counted while at least
    one is under way. Not thread-safe.
    """

    def __init__(self) -> None:
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0
        self.total_bytes = 0

    def start(self, now_s: float) -> None:
        self._advance(now_s)
        self._active += 1

    def stop(self, now_s: float, moved_bytes: int, operations: int = 1) -> None:
        """Operations end that have moved ``moved_bytes`` together (0: they failed)."""
        self._advance(now_s)
        self._active -= operations
        self._moved(moved_bytes)

    def add(self, moved_bytes: int, busy_s: float) -> None:
        """Add an operation that was timed elsewhere, and overlapped no other."""
        self._busy_s += busy_s
        self._moved(moved_bytes)

    def _moved(self, moved_bytes: int) -> None:
        self._bytes += moved_bytes
        self.total_bytes += moved_bytes
        if self._busy_s > _WINDOW_S:
            # Halving both keeps the rate, and gives old operations less weight.
            self._busy_s /= 2
            self._bytes /= 2

    def bytes_per_s(self) -> float:
        """Return the rate, 0.0 while nothing was measured."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def _advance(self, now_s: float) -> None:
        if self._active:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s


DEFAULT_HISTORY: Final = 65_536


@dataclass(frozen=True, slots=True)
class KeyEventRecord:
    """Chunks that a tier gained (``stored``) or lost, in whole digests."""

    tier: str
    stored: bool
    keys: Collection[bytes]
    """The collection does not change any more."""


class EventLog:
    """The last ``history`` events, numbered from 1, some of them not taken yet."""

    def __init__(self, history: int = DEFAULT_HISTORY) -> None:
        self._history: deque[KeyEventRecord] = deque(maxlen=history)
        self.last_seq = 0
        self._taken_seq = 0
        self._dropped = 0

    def append(self, tier: str, *, stored: bool, keys: Collection[bytes]) -> None:
        """Log an event, unless ``keys`` is empty."""
        if not keys:
            return
        self._history.append(KeyEventRecord(tier, stored, keys))
        self.last_seq += 1

    @property
    def untaken_dropped(self) -> int:
        """Events that were forgotten before `take`."""
        untaken = self.last_seq - self._taken_seq
        return self._dropped + max(0, untaken - len(self._history))

    def take(self) -> list[KeyEventRecord]:
        """Return the events since the last call; if they were too many, the oldest are lost."""
        self._dropped, untaken = self.untaken_dropped, self.last_seq - self._taken_seq
        self._taken_seq = self.last_seq
        return self._last(untaken)

    def after(self, seq: int) -> list[KeyEventRecord] | None:
        """Return the events after number ``seq``; None if some of them are not kept any more."""
        wanted = self.last_seq - seq
        return self._last(wanted) if 0 <= wanted <= len(self._history) else None

    def _last(self, count: int) -> list[KeyEventRecord]:
        return [*islice(reversed(self._history), count)][::-1]


def to_wire(record: KeyEventRecord) -> wire.KeyEvent:
    """Return an event with its keys packed."""
    packed = wire.pack_keys(key64(key) for key in record.keys)
    return wire.KeyEvent(tier=record.tier, stored=record.stored, keys=packed)
