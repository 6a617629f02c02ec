"""One worker of LMCache's: how far its messages were followed. Pure; times are passed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from router.lmcache.workers.words import FullSyncStartMsg, KVOpEvent, RegisterMsg

MAX_LOCATIONS: Final = 16
"""Of one worker; messages of more are refused."""
SYNC_AGAIN_S: Final = 60.0
"""A worker stores nothing while it sends its keys, 5 s at least: it is not asked more often."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What becomes of some operations."""

    fresh: Sequence[KVOpEvent]
    """Those to be applied: after a gap, the ones behind it."""
    late: int
    """How many were seen before, or are an ended process's."""
    gap: bool


@dataclass(slots=True)
class Sync:
    """A full sync under way, or the last one."""

    call: FullSyncStartMsg
    received: set[int] = field(default_factory=set)
    ended: bool = False
    noted: bool = False
    """Whether its completion was."""

    @property
    def is_complete(self) -> bool:
        """Whether all has come."""
        return self.ended and len(self.received) == self.call.batch_count

    def missing(self, most: int = 1000) -> list[int]:
        """Return batches that were sent and have not come."""
        if not self.ended:
            return []
        return [each for each in range(self.call.batch_count) if each not in self.received][:most]


@dataclass(eq=False, slots=True, kw_only=True)
class Worker:
    """A worker that has registered."""

    call: RegisterMsg
    """Its registration, or the heartbeat that stands for it."""
    registered_wall_s: float
    """Since 1970."""
    seen_s: float
    from_start: bool
    """Whether it was known before its first operation; else numbers may begin anywhere."""
    heartbeats: int = 0
    sync: Sync | None = None
    wants_sync: str | None = None
    """Why its keys are to be asked for."""
    sync_asked_s: float | None = None
    """When that was done last."""
    _next: dict[str, int] = field(default_factory=dict)

    @property
    def has_told(self) -> bool:
        """Whether it has told of any operation."""
        return bool(self._next)

    def take(self, location: str, operations: Sequence[KVOpEvent]) -> Taken | None:
        """Follow the numbers of operations; None where there are too many locations."""
        expected = self._next.get(location)
        if expected is None and len(self._next) >= MAX_LOCATIONS:
            return None
        if expected is None and self.from_start:
            expected = 0
        fresh: list[KVOpEvent] = []
        late, gap = 0, False
        for each in operations:
            if expected is not None and each.seq_num < expected:
                late += 1
                continue
            if expected is not None and each.seq_num > expected:
                gap = True
                fresh.clear()
            fresh.append(each)
            expected = each.seq_num + 1
        if expected is not None:
            self._next[location] = expected
        return Taken(fresh, late, gap)

    def begin_sync(self, call: FullSyncStartMsg) -> None:
        """Follow a full sync: the worker has one at a time, so an earlier one has been given up."""
        self.sync = Sync(call)

    def sync_due(self, now_s: float) -> str | None:
        """Return why its keys are to be asked for now; None if they are not."""
        asked_s = self.sync_asked_s
        if self.wants_sync is None or (asked_s is not None and now_s - asked_s < SYNC_AGAIN_S):
            return None
        self.sync_asked_s = now_s
        return self.wants_sync
