"""Which chunks to write to disk, and when: workloads replayed against a pool and a disk tier.

The engine's own decisions (`Decider`, its indexes and its cascade) without bytes. A request's
leading chunks that CPU RAM or disk has are hits, and those on disk are promoted. The others are
stored. A `WriteRule` chooses which chunks are put to disk. The device writes a number of chunks for
each access; where that is limited, the put queue fills, and puts are dropped and tried again as in
the engine.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from bench.discrete.conversation import Conversation
from bench.workloads.generated import poisson
from bench.workloads.session import BLOCK_TOKENS, Session, Span
from cacheengine.record import CPU
from cacheengine.residency.cascade import Cascade
from cacheengine.residency.decider import Decider
from cacheengine.residency.local_index import LocalIndex
from cacheengine.residency.pool_index import EntryState, PoolEntry, PoolIndex
from cacheengine.tiers.tier import GetOutcome, PutOutcome

Request = Sequence[bytes]
"""The keys of a prompt's chunks, in order."""

_PUT_QUEUE_SHARE: Final = 0.5
"""The engine's default."""
_ANSWER_TOKENS_S: Final = 50.0
_SESSION_GAP_S: Final = 2.0


class WriteRule(StrEnum):
    """Which chunks are put to disk, and when."""

    ENGINE = "when stored; a slow disk: used again first (the engine's)"
    STORED = "when stored"
    SECOND_USE = "on second use"
    LEAVING = "when leaving RAM"
    SECOND_USE_OR_LEAVING = "on second use, or when leaving RAM"
    SPARED = "the engine's; 32 chunks that are not on disk are spared"


_ON_SECOND_USE: Final = (WriteRule.SECOND_USE, WriteRule.SECOND_USE_OR_LEAVING)
_ON_LEAVING: Final = (WriteRule.LEAVING, WriteRule.SECOND_USE_OR_LEAVING)


@dataclass(frozen=True, kw_only=True)
class TieredCase:
    """A replica's sizes, in chunks, and its rules."""

    slots: int
    disk_chunks: int
    rule: WriteRule = WriteRule.ENGINE
    policy: str = "ARC"
    disk_policy: str = "ARC"
    writes_per_access: float | None = None
    """What the device can write; None: everything."""


@dataclass(frozen=True, kw_only=True)
class TieredResult:
    """One workload on one replica, as shares of all accesses."""

    hits: float
    hits_disk: float
    writes: float
    kept_by_restart: float
    """What CPU RAM and disk hold at half-time gives hits later; the share from the disk alone."""


class TieredReplay:
    """A pool and a disk tier that start empty."""

    def __init__(self, case: TieredCase) -> None:
        self._case = case
        self._disk = LocalIndex(case.disk_chunks, 1, policy=case.disk_policy)
        self._decider = Decider(
            case.slots,
            case.policy,
            [self._disk],
            chunk_bytes=1,
            local_cpu=True,
            put_queue_share=_PUT_QUEUE_SHARE,
        )
        self._pool = self._decider.pool
        if case.rule not in (WriteRule.ENGINE, WriteRule.SPARED):
            self._decider.cascades["disk"] = Cascade(
                self._decider.state,
                self._disk,
                int(_PUT_QUEUE_SHARE * case.slots),
                first_use_share=1.0,
            )
        if case.rule is WriteRule.SPARED:
            self._pool = self._decider.pool = self._decider.state.pool = _SparingPool(
                case.slots, case.policy, self._disk
            )
        self._cascade = self._decider.cascades["disk"]
        # Keys used, the least recent first, and whether more than once.
        self._used: OrderedDict[bytes, bool] = OrderedDict()
        self._most_used = case.slots + case.disk_chunks
        # How many chunks the device could write by now.
        self._credit = 0.0
        self.hits_cpu = 0
        self.hits_disk = 0

    @property
    def writes(self) -> int:
        """Chunks written to disk."""
        return self._decider.stats.disk.puts

    def held(self) -> tuple[set[bytes], set[bytes]]:
        """Return what is in CPU RAM, and what is on disk."""
        return {*self._pool.ready_keys()}, {*self._disk.keys()}

    def access(self, request: Request) -> None:
        """Load what is there, store what is not, and write what the device has time for."""
        rule, rate = self._case.rule, self._case.writes_per_access
        protected = frozenset(request)
        self._load(request, protected)
        self._decider.touch(request, 0.0)
        if rate is not None:
            self._credit += rate * len(request)
            if rule in _ON_LEAVING:
                self._write_ahead()
        wanted = [key for key in dict.fromkeys(request) if self._pool.get(key) is None]
        self._evict_ahead(len(wanted), protected)
        reserved = self._decider.prepare_store(wanted, 0.0, protected).keys
        entries = self._decider.end_stores(reserved, 0.0, success=True, prefetched=False)
        if rule in _ON_SECOND_USE or rule in _ON_LEAVING:
            self._pool_only(request, entries)
        else:
            self._decider.put_down(entries, 0.0)
        self._put(inf if rate is None else int(self._credit))
        if not self._cascade.waiting and rule not in _ON_LEAVING:
            self._credit = min(self._credit, 0.0)  # an idle device saves no time up

    def _load(self, request: Request, protected: frozenset[bytes]) -> None:
        below: dict[bytes, None] = {}
        for key in request:
            if self._pool.ready(key) is not None:
                self.hits_cpu += 1
            elif key in self._disk:
                below[key] = None
            else:
                break
        self._evict_ahead(len(below), protected)
        # What was written for that may have replaced some of them.
        found = [*itertools.takewhile(self._disk.__contains__, below)]
        room, _ = self._decider.state.make_room(len(found), protected, 0.0)
        self.hits_disk += room
        for key in reversed(found[:room]):
            self._disk.begin_read(key)
            entry = self._pool.add(key, EntryState.PROMOTING)
            self._disk.end_read(key, GetOutcome.OK, 0.0)
            self._pool.publish(entry, 0.0)
            self._decider.state.emit(CPU, stored=True, keys=[key])

    def _pool_only(self, request: Request, entries: Sequence[PoolEntry]) -> None:
        """Store as the engine does, but queue no put unless the rule wants it on second use."""
        for entry in entries:
            self._pool.release(entry)
        for key in request if self._case.rule in _ON_SECOND_USE else ():
            is_again = self._used.pop(key, None) is not None
            self._used[key] = is_again
            if len(self._used) > self._most_used:
                self._used.popitem(last=False)
            ready = self._pool.ready(key)
            if is_again and ready is not None:
                self._cascade.queue(ready, 0.0)

    def _write_ahead(self) -> None:
        """Write the next chunks to leave, as far as the device has time."""
        self._credit = min(self._credit, self._case.slots / 2)
        for entry in self._pool.victims(self._case.slots // 2, ()):
            if self._credit < 1:
                return
            if entry.key not in self._disk:
                self._cascade.queue(entry, 0.0)
                self._put(1)

    def _evict_ahead(self, count: int, protected: frozenset[bytes]) -> None:
        """Write what is about to leave, where the device writes everything."""
        if self._case.rule in _ON_LEAVING and self._case.writes_per_access is None:
            for entry in self._pool.victims(count - self._pool.free_slots, protected):
                self._cascade.queue(entry, 0.0)
            self._put(inf)

    def _put(self, most: float) -> None:
        while most > 0 and self._cascade.waiting:
            entries, victims = self._cascade.begin(int(min(32, most)), 0.0)
            self._cascade.deleted(victims)
            self._cascade.end(entries, [PutOutcome.STORED] * len(entries), 0.0)
            most -= len(entries)
            self._credit -= len(entries)

    def check(self) -> None:
        """Raise AssertionError if the engine's bookkeeping contradicts itself."""
        self._decider.check()


class _SparingPool(PoolIndex):
    """Evicts a chunk that the disk has before up to 32 chunks that would be lost."""

    def __init__(self, num_slots: int, policy: str, disk: LocalIndex) -> None:
        super().__init__(num_slots, policy)
        self._disk = disk

    def victims(self, count: int, protected: Container[bytes]) -> list[PoolEntry]:
        if count <= 0:
            return []
        found = super().victims(count + 32, protected)
        # Stable: among equals the order stays.
        return sorted(found, key=lambda each: each.key not in self._disk)[:count]


def measure_tiers(requests: Sequence[Request], case: TieredCase) -> TieredResult:
    """Replay a workload from an empty replica."""
    replay = TieredReplay(case)
    half = len(requests) // 2
    for request in requests[:half]:
        replay.access(request)
    cpu, disk = replay.held()
    for request in requests[half:]:
        replay.access(request)
    replay.check()
    accesses = sum(map(len, requests))
    later = requests[half:]
    return TieredResult(
        hits=(replay.hits_cpu + replay.hits_disk) / accesses,
        hits_disk=replay.hits_disk / accesses,
        writes=replay.writes / accesses,
        kept_by_restart=_hits(later, disk) / max(1, _hits(later, cpu | disk)),
    )


def _hits(requests: Iterable[Request], held: Container[bytes]) -> int:
    return sum(sum(1 for _ in itertools.takewhile(held.__contains__, each)) for each in requests)


def agents_requests(sessions: Sequence[Session], seed: int) -> list[Request]:
    """Return the requests of sessions that begin at random, one in two seconds, in their order."""
    answers = itertools.count(1 + max(span.number for each in sessions for span in _spans(each)))
    timed: list[tuple[float, int, Request]] = []
    for session in poisson(sessions, random.Random(seed)):
        said, now_s = Conversation(BLOCK_TOKENS), session.start_s * _SESSION_GAP_S
        for turn in session.turns:
            now_s += turn.pause_s
            prompt = said.turn(turn.spans, Span(next(answers), turn.output_tokens))
            timed.append((now_s, len(timed), prompt.keys[: prompt.prompt_blocks]))
            now_s += turn.output_tokens / _ANSWER_TOKENS_S
    return [keys for _, _, keys in sorted(timed)]


def _spans(session: Session) -> Iterator[Span]:
    return itertools.chain.from_iterable(turn.spans for turn in session.turns)
