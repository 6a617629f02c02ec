"""Requests that wait for chunks below the pool, as a scheduler looks them up step by step.

Used next to `CacheEngine`, on the scheduler's thread alone: the chunks that one step's lookups
found below the pool are promoted in one call at the step's end, and until they have come the
request is not looked up again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cacheengine.residency.decisions import Presence, Promotion
from cacheengine.residency.pool_index import Holder

PIN_S: Final = 10.0
"""How long chunks promoted for a request stay pinned if it never comes back."""
_LEAST_QUIET_S: Final = 0.25
"""A small model computes a prompt faster than a busy disk answers: the disk is not stuck then."""
_MOST_QUIET_S: Final = 5.0
"""A tier that ends no read for this long is stuck, however long the prompt would compute."""
_LONGEST_S: Final = 60.0


@dataclass(slots=True)
class Patience:
    """How long one request waits: as long as its tiers keep ending reads. Pure.

    A request whose chunks are queued behind others' waits longer than it would compute. It should:
    computing them would make all requests behind it wait. Only tiers that end no read for as long
    as computing would take are not waited for.
    """

    began_s: float
    reads_ended: int
    moved_s: float

    def is_over(
        self, now_s: float, *, reads_ended: int, compute_s: float, for_room: bool = False
    ) -> bool:
        """Whether the request should compute the chunks that have not come by now.

        ``reads_ended`` is how many reads its tiers have answered so far; ``compute_s`` how long
        computing would take. A request that waits ``for_room`` waits for others' loads instead.
        """
        if for_room or reads_ended != self.reads_ended:
            self.reads_ended = reads_ended
            self.moved_s = now_s
        quiet_s = min(max(compute_s, _LEAST_QUIET_S), _MOST_QUIET_S)
        return now_s - self.moved_s >= quiet_s or now_s - self.began_s >= _LONGEST_S


class Promotes(Protocol):
    """The calls of `CacheEngine` that are used here."""

    def lookup(self, key: bytes) -> Presence:
        """Say where a chunk is."""

    def promote(self, keys: Sequence[bytes], *, pin_s: float, holder: Holder = None) -> Promotion:
        """Bring a prefix into the pool."""

    def may_promote(self) -> bool:
        """Whether a chunk from below would find room."""

    def reads_ended(self, tier: str) -> int:
        """How many reads from a lower tier were answered so far."""

    def end_pins(self, keys: Iterable[bytes], holder: Holder) -> None:
        """End one holder's pins of chunks."""


@dataclass(slots=True)
class _Wait:
    """What is known of a request from its first lookup below the pool to its end."""

    holder: str
    patience: Patience | None = None
    is_over: bool = False
    """It computes the chunks that have not come."""
    tiers: dict[bytes, str] = field(default_factory=dict)
    """Chunks found below the pool, in the order of the lookups, and where."""
    chunks: list[bytes] = field(default_factory=list)
    """All chunks that its last lookups found, those in the pool included."""
    promotions: dict[bytes, Promotion] = field(default_factory=dict)
    under_way: list[Promotion] = field(default_factory=list)
    """The promotions of the last time that it was promoted."""
    pending: bytes | None = None
    """The last chunk that its last lookups found on its way for others."""
    is_deferred: bool = False
    """Some chunk had to be waited for when it was looked up last."""
    computed_tokens: int | None = None
    """How many tokens of it the GPU had then."""
    asked_in_step: int = 0
    last_position: int = 0
    looks_back: bool = False
    """It is looked up from its end: all layers have a window."""

    @property
    def was_refused(self) -> bool:
        """Whether some of the chunks promoted last found no room."""
        return any(each.was_refused for each in self.under_way)


class PromotionWaits:
    """Each request's chunks on their way up, and the queue of requests that found no room.

    A promotion that was refused because there was no room, or too much was pinned, is asked for
    again for the first request in the queue, once a step; new requests join its end. So at most
    one request has a part of its prompt pinned while it waits for the rest: two of them could
    wait for each other. ``clock`` gives seconds; ``speed`` of these are one second of the engine.
    """

    def __init__(
        self,
        engine: Promotes,
        clock: Callable[[], float],
        *,
        speed: float = 1.0,
        on_promoted: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._pin_s = PIN_S / speed
        self._on_promoted = on_promoted
        self._waits: dict[str, _Wait] = {}
        self._wanting: dict[str, _Wait] = {}
        # Chunks that this step's lookups found, by request.
        self._found: dict[str, list[bytes]] = {}
        self._room_queue: dict[str, _Wait] = {}
        self._step = 0

    # --- a step's lookups ---

    def must_wait(self, req_id: str, computed_tokens: int, compute_s: float) -> bool:
        """Whether the request still waits, so that its lookups would have the same results.

        ``computed_tokens`` is how many tokens of its prompt the GPU has; ``compute_s`` how long
        computing the rest would take. If it does not wait, all of it must be looked up.
        """
        wait = self._waits.get(req_id)
        if wait is None:
            return False
        has_moved = wait.computed_tokens not in (None, computed_tokens)
        wait.computed_tokens = computed_tokens
        wait.asked_in_step = self._step
        if not wait.is_deferred:
            wait.patience = None  # that wait has ended; after a preemption another one begins
        elif not self._runs_out(wait, compute_s) and self._has_to_come(wait) and not has_moved:
            return True
        wait.is_deferred = False
        wait.pending = None
        return False

    def _runs_out(self, wait: _Wait, compute_s: float) -> bool:
        """Whether a deferred request stops waiting; it then leaves the queue for room."""
        assert wait.patience is not None
        wait.is_over = wait.patience.is_over(
            self._clock(),
            reads_ended=self._reads_ended(wait),
            compute_s=compute_s,
            for_room=wait.holder in self._room_queue,
        )
        if wait.is_over:
            self._room_queue.pop(wait.holder, None)
        return wait.is_over

    def _reads_ended(self, wait: _Wait) -> int:
        # A chunk that is pending for another request may come from any tier.
        tiers = {*wait.tiers.values()} if wait.pending is None else ("disk", "remote")
        return sum(map(self._engine.reads_ended, tiers))

    def _has_to_come(self, wait: _Wait) -> bool:
        if wait.was_refused:
            self._room_queue.setdefault(wait.holder, wait)
        if wait.holder in self._room_queue or not all(each.done for each in wait.under_way):
            return True
        return wait.pending is not None and self._is_pending(wait.pending)

    def _is_pending(self, chunk: bytes) -> bool:
        return self._engine.lookup(chunk) is Presence.PENDING

    def want(self, req_id: str, chunk: bytes, tier: str, position: int) -> bool:
        """Have a chunk that is below the pool promoted at the step's end.

        Returns whether the request waits for it: not a second time for a chunk that did not come
        or did not stay. ``position`` is the chunk's place in the request.
        """
        wait = self._deferred(req_id)
        if wait is None:
            return False
        promotion = wait.promotions.get(chunk)
        if chunk not in wait.tiers:
            wait.looks_back |= req_id in self._wanting and position < wait.last_position
            wait.last_position = position
            wait.tiers[chunk] = tier
            self._wanting[req_id] = wait
        elif promotion is not None and promotion.done and req_id not in self._room_queue:
            return False
        wait.is_deferred = True
        self.found(req_id, chunk)
        return True

    def found(self, req_id: str, chunk: bytes) -> None:
        """Note that a chunk is ready: promoting the chunks behind it must not evict it."""
        self._found.setdefault(req_id, []).append(chunk)

    def wait_for(self, req_id: str, chunk: bytes) -> bool:
        """Note that a chunk is on its way; False if the request waits no longer."""
        wait = self._deferred(req_id)
        if wait is None:
            return False
        wait.pending = chunk
        wait.is_deferred = True
        self.found(req_id, chunk)
        return True

    def _deferred(self, req_id: str) -> _Wait | None:
        """Return what is known of a request, None if it may not wait."""
        wait = self._waits.setdefault(req_id, _Wait(req_id))
        wait.asked_in_step = self._step
        if wait.is_over:
            return None
        if wait.patience is None:
            now_s = self._clock()
            wait.patience = Patience(began_s=now_s, reads_ended=-1, moved_s=now_s)
        return wait

    def tier_of(self, req_id: str, chunk: bytes) -> str | None:
        """Return the tier where a request's chunk was found below the pool, if it was."""
        wait = self._waits.get(req_id)
        return None if wait is None else wait.tiers.get(chunk)

    # --- a step's end ---

    def end_step(self) -> None:
        """Promote the chunks that the step's lookups found below the pool."""
        for req_id, wait in self._wanting.items():
            wait.chunks = self._found[req_id]
        self._ask_again()
        for req_id, wait in self._wanting.items():
            if self._room_queue:
                self._room_queue.setdefault(req_id, wait)
            else:
                self._promote(wait)
        self._wanting.clear()
        self._found.clear()
        self._step += 1

    def _ask_again(self) -> None:
        """Promote for the first request in the queue, if there is room now.

        A request that the scheduler did not ask for in this step (it waits for something else)
        does not keep the others from room.
        """
        asked = (each for each in self._room_queue.values() if each.asked_in_step == self._step)
        wait = next(asked, None)
        if wait is None or not self._engine.may_promote():
            return
        self._wanting.pop(wait.holder, None)
        # All of it: pins are renewed, and chunks that have left the pool meanwhile come again.
        self._promote(wait)

    def _promote(self, wait: _Wait) -> None:
        """Promote a request's chunks; it joins the queue if some of them found no room."""
        # A promotion ends at the first gap; with a window the chunks behind a gap are useful.
        parts = [[each] for each in wait.chunks] if wait.looks_back else [wait.chunks]
        wait.under_way = [self._promote_part(wait, part) for part in parts]
        if wait.was_refused:
            self._room_queue.setdefault(wait.holder, wait)
        else:
            self._room_queue.pop(wait.holder, None)

    def _promote_part(self, wait: _Wait, chunks: list[bytes]) -> Promotion:
        promotion = self._engine.promote(chunks, pin_s=self._pin_s, holder=wait.holder)
        wait.promotions.update(dict.fromkeys(chunks, promotion))
        # A caller that is woken by a refusal asks again at once, and is refused again, for as long
        # as the pins of others last. Room is asked for once a step.
        was_refused_at_once = promotion.done and promotion.was_refused
        if self._on_promoted is not None and not was_refused_at_once:
            promotion.add_done_callback(self._on_promoted)
        return promotion

    # --- the end ---

    def end(self, req_id: str) -> None:
        """Forget a request, and end the pins that it did not use."""
        wait = self._waits.pop(req_id, None)
        self._wanting.pop(req_id, None)
        self._found.pop(req_id, None)
        self._room_queue.pop(req_id, None)
        if wait is not None and wait.promotions:
            self._engine.end_pins(list(wait.promotions), req_id)

    def clear(self) -> None:
        """Forget all requests, as the pool has forgotten its chunks."""
        self._waits.clear()
        self._wanting.clear()
        self._found.clear()
        self._room_queue.clear()
