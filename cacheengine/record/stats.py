"""What the engine counts and measures. Every counter is defined on its line."""

from dataclasses import dataclass, field, replace
from typing import Final

CPU: Final = "cpu"
"""The name of the first tier: the pool."""


@dataclass(slots=True)
class TierStats:
    """Counts of one lower tier."""

    puts: int = 0
    """Chunks written to it."""
    put_bytes: int = 0
    """Bytes of those."""
    put_drops: int = 0
    """Chunks not written: queue full, tier full or resting after an error, or cleared."""
    gets: int = 0
    """Chunks read whole from it."""
    get_bytes: int = 0
    """Bytes of those."""
    get_misses: int = 0
    """Chunks that it was thought to hold and did not."""
    corrupt: int = 0
    """Chunks found damaged on reading, and removed."""
    io_errors: int = 0
    """Reads and writes that failed for another reason (no space, no answer, ...)."""
    evictions: int = 0
    """Chunks evicted from it to make room."""
    asked: int = 0
    """Chunks that it was asked for (only a shared tier is)."""
    found: int = 0
    """Of those: held by it."""
    unanswered: int = 0
    """Of those: it could not say."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine's start; bytes are payload bytes."""

    lookups: int = 0
    """Chunks asked for by `lookup`, and by `try_hold` when it succeeded."""
    hits_cpu: int = 0
    """Of those: ready in the pool."""
    hits_pending: int = 0
    """Of those: being stored or promoted."""
    hits_disk: int = 0
    """Of those: on disk, and not in the pool."""
    hits_remote: int = 0
    """Of those: known to be held by the remote tier only."""
    lookups_unknown: int = 0
    """Of those: the remote tier was being asked."""
    stores: int = 0
    """Chunks that became visible by `complete_store`."""
    store_bytes: int = 0
    """Bytes of those."""
    store_drops: int = 0
    """Chunks for which `prepare_store` found no room."""
    store_failures: int = 0
    """Chunks whose store ended with success=False, or was cleared while under way."""
    evictions: int = 0
    """Chunks evicted from the pool to make room."""
    prefetches: int = 0
    """Calls of `promote`."""
    promoted: int = 0
    """Chunks brought into the pool by those."""
    promoted_bytes: int = 0
    """Bytes of those."""
    promote_drops: int = 0
    """Chunks below the pool that found no room in it, or too much of it pinned."""
    prefetch_unused_chunks: int = 0
    """Chunks promoted, or copied here with a pin, that were not held until their pin ended, by
    time, clearing or eviction (of those without a pin: until they left the pool)."""
    prefetch_unused_bytes: int = 0
    """Bytes of those."""
    pins_expired: int = 0
    """Pins that reached their deadline unused."""
    events_dropped: int = 0
    """Events lost to vLLM's stream because nobody took them in time."""
    cpu_used_bytes: int = 0
    """Now: bytes in the pool, those under way included."""
    cpu_held_bytes: int = 0
    """Now: bytes in the pool that are held, pinned, being put or not ready."""
    put_queue_bytes: int = 0
    """Now: bytes whose put is queued or under way, once for each tier."""
    disk: TierStats = field(default_factory=TierStats)
    """The disk tier's counts."""
    remote: TierStats = field(default_factory=TierStats)
    """The remote tier's counts."""

    @property
    def puts(self) -> int:
        """Chunks written to lower tiers."""
        return self.disk.puts + self.remote.puts

    @property
    def put_bytes(self) -> int:
        """Bytes of those."""
        return self.disk.put_bytes + self.remote.put_bytes

    @property
    def put_drops(self) -> int:
        """Puts to lower tiers that were dropped."""
        return self.disk.put_drops + self.remote.put_drops

    @property
    def gets(self) -> int:
        """Chunks read whole from lower tiers."""
        return self.disk.gets + self.remote.gets

    @property
    def get_bytes(self) -> int:
        """Bytes of those."""
        return self.disk.get_bytes + self.remote.get_bytes

    @property
    def get_misses(self) -> int:
        """Chunks that a lower tier was thought to hold and did not."""
        return self.disk.get_misses + self.remote.get_misses

    @property
    def corrupt(self) -> int:
        """Chunks of lower tiers found damaged, and removed."""
        return self.disk.corrupt + self.remote.corrupt

    @property
    def io_errors(self) -> int:
        """Reads from and writes to lower tiers that failed otherwise."""
        return self.disk.io_errors + self.remote.io_errors

    @property
    def disk_evictions(self) -> int:
        """Chunks evicted from disk."""
        return self.disk.evictions

    def below(self, tier: str) -> TierStats:
        """Return the counts of a lower tier by its name."""
        return self.remote if tier == "remote" else self.disk

    def copy(self) -> "EngineStats":
        """Return the counts of this moment, which do not change any more."""
        return replace(self, disk=replace(self.disk), remote=replace(self.remote))


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

    def start(self, now_s: float) -> None:
        """An operation begins."""
        self._advance(now_s)
        self._active += 1

    def stop(self, now_s: float, moved_bytes: int) -> None:
        """An operation ends, having moved so much (0: it failed)."""
        self._advance(now_s)
        self._active -= 1
        self._bytes += moved_bytes
        if self._busy_s > _WINDOW_S:
            # Halving both keeps the rate, and lets the old fade.
            self._busy_s /= 2
            self._bytes /= 2

    def bytes_per_s(self) -> float:
        """Return the rate, 0.0 while nothing was measured."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def _advance(self, now_s: float) -> None:
        if self._active:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s
