"""A scheduler that makes the calls of vLLM's connector to an engine, and compares each byte.

The calls are those of `cacheengine.connector.manager`, step by step: a request is looked up at
each step until none of its chunks is on its way that it waits for (`PromotionWaits`). What a step
finds is held until the step's end.
Chunks are held while they are loaded, and reserved while they are stored, for some steps each.
Requests are aborted at any time; as in vLLM, transfers that have begun then still finish.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.promotion_waits import PromotionWaits
from cacheengine.residency.decisions import Presence, StoreReservation

CHUNK_S: Final = 0.02
"""How long computing a chunk is said to take: as for 12,800 tokens a second."""
LATEST_S: Final = 1.0
"""How much longer than computing it a request may wait."""
_MOST_RUNNING: Final = 16
_ABORTED: Final = 0.1
_STORES_FAILED: Final = 0.03
_LONGEST_COPY_STEPS: Final = 4
_LONGEST_PREFILL_STEPS: Final = 10
_STEPS_FOR_ROOM: Final = 40
_EXAMPLES: Final = 10
PAGE_BYTES: Final = 4096
LONGEST_CHUNKS: Final = 48
"""Chunks of a prompt."""
_DIGEST_BYTES: Final = 64


def prefix_keys(conversation: int, chunks: int) -> list[bytes]:
    """Return the keys of a conversation's first chunks."""
    return [hashlib.sha256(b"%d/%d" % (conversation, n)).digest() for n in range(chunks)]


def a_prompt(rng: random.Random, conversations: int, longest_chunks: int) -> list[bytes]:
    """Return the keys of a prompt: half of the prompts are whole conversations.

    The lower its number, the more often a conversation is asked for.
    """
    chunks = longest_chunks if rng.random() < 0.5 else rng.randint(1, longest_chunks)
    return prefix_keys(int(conversations * rng.random() ** 2), chunks)


def content(key: bytes, size_bytes: int) -> bytes:
    """Return a chunk's bytes: no two pages are alike, within a chunk or among chunks."""
    pages = range(-(-size_bytes // PAGE_BYTES))
    digests = (hashlib.blake2b(b"%d" % page, key=key).digest() for page in pages)
    return b"".join(digest * (PAGE_BYTES // _DIGEST_BYTES) for digest in digests)[:size_bytes]


@dataclass(kw_only=True)
class Counts:
    """What has happened to requests and chunks."""

    requests: int = 0
    aborted: int = 0
    loaded_chunks: int = 0
    """Compared before they were copied, and again after."""
    promoted_chunks: int = 0
    """The ones of these that were promoted from a lower tier for the request."""
    wrong_chunks: int = 0
    stored_chunks: int = 0
    failed_stores: int = 0
    without_room: int = 0
    """Stores that found no free slot for any chunk in `_STEPS_FOR_ROOM` steps."""
    waits: int = 0
    """Requests that have waited for chunks on their way up."""
    late_waits: int = 0
    """The ones of these that waited longer than computing them takes, by more than `LATEST_S`."""
    latest_ms: int = 0
    """By how much the latest was later than computing it, without what its process was stopped."""
    wrong: list[str] = field(default_factory=list)
    """The first wrong chunks, in words."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request, from its first lookup to its end."""

    name: str
    keys: Sequence[bytes]
    abort_at: int
    """The number of its step at which it is aborted; larger than its last: never."""
    steps: int = 0
    waits_since_s: float | None = None

    @property
    def is_aborted(self) -> bool:
        return self.steps >= self.abort_at


class Scheduler:
    """One replica's scheduler; one thread calls `step` repeatedly.

    Prompts are prefixes of ``conversations``, which all replicas know.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        seed: str,
        conversations: int,
        longest_chunks: int,
        requests_per_step: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = random.Random(seed)
        self._conversations = conversations
        self._longest_chunks = longest_chunks
        self._requests_per_step = requests_per_step
        self._waits = PromotionWaits(engine, clock)
        self._step_at_s = clock()
        self._stopped_s = 0.0
        self._running: dict[str, tuple[_Request, Iterator[None]]] = {}
        self._step_holds: set[bytes] = set()
        self._number = 0
        self.counts = Counts()
        self.is_admitting = True

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._running

    def step(self) -> None:
        """Advance every request by a step, and perhaps admit another."""
        self._step_at_s = self._clock()
        if self.is_admitting and self._rng.random() < self._requests_per_step:
            self._admit()
        for request, course in list(self._running.values()):
            request.steps += 1
            if next(course, self) is self:  # its course yields None
                del self._running[request.name]
                self._waits.end(request.name)
        self._waits.end_step()
        self._release_step_holds()
        self._engine.take_events()

    def note_stopped(self) -> None:
        """Note that the process was stopped by a signal until now."""
        now_s = self._clock()
        self._stopped_s += now_s - self._step_at_s
        self._step_at_s = now_s

    def _now_s(self) -> float:
        return self._clock() - self._stopped_s

    def _admit(self) -> None:
        if len(self._running) >= _MOST_RUNNING:
            return
        self._number += 1
        rng = self._rng
        request = _Request(
            name=f"request {self._number}",
            keys=a_prompt(rng, self._conversations, self._longest_chunks),
            abort_at=rng.randint(1, 20) if rng.random() < _ABORTED else 1 << 30,
        )
        self._running[request.name] = request, self._course(request)
        self.counts.requests += 1

    def _course(self, request: _Request) -> Iterator[None]:
        """Run a request: an iteration a step."""
        while (hits := self._look_up(request)) is None:
            if request.waits_since_s is None:
                request.waits_since_s = self._now_s()
            yield
            if request.is_aborted:
                self.counts.aborted += 1
                break
        self._count_wait(request)
        if hits is None:
            return
        yield from self._load(request, request.keys[:hits])
        for _ in range(self._rng.randint(0, _LONGEST_PREFILL_STEPS)):
            if request.is_aborted:
                self.counts.aborted += 1
                return
            yield
        yield from self._store(request.keys[hits:])

    # --- lookups ---

    def _count_wait(self, request: _Request) -> None:
        if request.waits_since_s is None:
            return
        late_s = self._now_s() - request.waits_since_s - CHUNK_S * len(request.keys)
        self.counts.waits += 1
        self.counts.late_waits += late_s > LATEST_S
        self.counts.latest_ms = max(self.counts.latest_ms, int(1000 * late_s))

    def _look_up(self, request: _Request) -> int | None:
        """Return how many leading chunks this step can load; None while it waits for some."""
        compute_s = CHUNK_S * len(request.keys)
        if self._waits.must_wait(request.name, 0, compute_s, CHUNK_S):
            return None
        hits, must_wait = 0, False
        for position, key in enumerate(request.keys):
            if self._is_held(key):
                self._waits.found(request.name, key)
                hits += 1
                continue
            match self._engine.lookup(key):
                case Presence.MISS:
                    break
                case Presence.PENDING | Presence.CPU:
                    tier = None
                case Presence.DISK:
                    tier = "disk"
                case Presence.REMOTE | Presence.UNKNOWN:
                    tier = "remote"
            if not self._waits.want(request.name, key, tier, position):
                break
            must_wait = True
        return None if must_wait else hits

    def _is_held(self, key: bytes) -> bool:
        if key not in self._step_holds:
            if self._engine.try_hold(key) is None:
                return False
            self._step_holds.add(key)
        return True

    def _release_step_holds(self) -> None:
        if self._step_holds:
            self._engine.release(list(self._step_holds))
            self._step_holds.clear()

    # --- loads and stores ---

    def _load(self, request: _Request, keys: Sequence[bytes]) -> Iterator[None]:
        if not keys:
            return
        slots = self._engine.hold(keys, held_before=True, holder=request.name)
        self._engine.touch(keys)
        self._compare(request, keys, slots, "at the beginning of its load")
        for _ in range(self._rng.randint(1, _LONGEST_COPY_STEPS)):
            yield
        self._compare(request, keys, slots, "at the end of its load")
        self._engine.release(keys)
        self.counts.loaded_chunks += len(keys)
        self.counts.promoted_chunks += sum(self._is_promoted(request, key) for key in keys)

    def _is_promoted(self, request: _Request, key: bytes) -> bool:
        return self._waits.tier_of(request.name, key) is not None

    def _compare(
        self, request: _Request, keys: Sequence[bytes], slots: Sequence[int], when: str
    ) -> None:
        for key, slot in zip(keys, slots, strict=True):
            view = self._engine.view(slot)
            if view == content(key, len(view)):
                continue
            self.counts.wrong_chunks += 1
            if len(self.counts.wrong) < _EXAMPLES:
                how = "promoted" if self._is_promoted(request, key) else "resident"
                wrong = f"{request.name}: chunk {key.hex()} in slot {slot}, {how}, {when}"
                self.counts.wrong.append(wrong)

    def _store(self, keys: Sequence[bytes]) -> Iterator[None]:
        if not keys:
            return
        self._engine.touch(keys)
        for _ in range(_STEPS_FOR_ROOM):
            reservation = self._engine.prepare_store(keys)
            if reservation is not None:
                yield from self._fill(reservation)
                return
            yield
        self.counts.without_room += 1

    def _fill(self, reservation: StoreReservation) -> Iterator[None]:
        """Write what was reserved in two steps: what is half written must not be found."""
        halves: list[tuple[memoryview, bytes]] = []
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            view = self._engine.view(slot)
            right, middle = content(key, len(view)), len(view) // 2
            view[:middle] = right[:middle]
            halves.append((view[middle:], right[middle:]))
        yield
        for view, right in halves:
            view[:] = right
        for _ in range(self._rng.randint(0, _LONGEST_COPY_STEPS)):
            yield
        is_whole = self._rng.random() >= _STORES_FAILED
        self._engine.complete_store(reservation.keys, success=is_whole)
        self.counts.stored_chunks += len(reservation.keys) if is_whole else 0
        self.counts.failed_stores += not is_whole
