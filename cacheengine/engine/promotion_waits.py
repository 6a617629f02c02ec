"""Requests that wait for chunks below the pool, as a scheduler looks them up step by step.

Used next to `CacheEngine`, on the scheduler's thread alone: the chunks that one step's lookups
found below the pool are promoted in one call at the step's end, and until they have come the
request is not looked up again.

There is one rule: a request waits while that costs less time than computing. Waiting costs time of
this request only. Computing costs as much time of each other request whose prompt is not computed
yet: prompts take turns on the GPU. So a request that is alone waits while its chunks are expected
earlier than they would be computed. Under load requests wait longer: computing what can be loaded
would make the load higher. Chunks are expected after the bytes queued before them, at the measured
speed; without room in the pool, after the end of the next pin. Of a prompt the prefix is loaded
that pays, and the rest is computed. No wait is longer than computing costs (`_GRACE_S` later, at
the latest).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.residency.decisions import Promotion

PIN_S: Final = 10.0
"""How long chunks promoted for a request stay pinned if it never comes back."""
_GRACE_S: Final = 0.25
"""A small model computes a prompt faster than a busy disk answers: this late, it still answers."""
_LONGEST_S: Final = 60.0


@dataclass(slots=True)
class _Wait:
    """What is known of a request from its first lookup to its end."""

    holder: str
    began_s: float | None = None
    compute_s: float = inf
    """What computing what the GPU does not have would cost, this request and the others."""
    chunk_s: float = inf
    """What computing one chunk would cost."""
    worth_s: float = inf
    """What computing the chunks that it waits for would cost."""
    is_over: bool = False
    """It computes the chunks that have not come."""
    tiers: dict[bytes, str | None] = field(default_factory=dict)
    """Chunks found below the pool, in the order of the lookups, and where; None: on their way."""
    chunks: list[bytes] = field(default_factory=list)
    """All chunks that its last lookups found, those in the pool included."""
    given_up: set[bytes] = field(default_factory=set)
    """Chunks that it computes, since that is faster."""
    promotions: dict[bytes, Promotion] = field(default_factory=dict)
    under_way: list[Promotion] = field(default_factory=list)
    """The promotions of the last time that it was promoted."""
    is_cramped: bool = False
    """The pool has no room in time for the chunks that found none."""
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
        """Whether some of the chunks promoted last found no room, and may find it in time."""
        return not self.is_cramped and any(each.was_refused for each in self.under_way)

    def computing_s(self, chunks: int) -> float:
        """Return what computing this many chunks would cost.

        The chunks of a window stand for everything before them.
        """
        if not chunks:
            return 0.0
        return self.compute_s if self.looks_back else chunks * self.chunk_s


class PromotionWaits:
    """Each request's chunks on their way up, and the queue of requests that found no room.

    A promotion that was refused because there was no room, or too much was pinned, is asked for
    again for the first request in the queue, once a step; new requests join its end. So at most
    one request has a part of its prompt pinned while it waits for the rest: two of them could
    wait for each other. ``clock`` gives the engine's seconds, as all times are.
    """

    def __init__(
        self,
        engine: CacheEngine,
        clock: Callable[[], float],
        *,
        pin_s: float = PIN_S,
        on_promoted: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._pin_s = pin_s
        self._on_promoted = on_promoted
        self._waits: dict[str, _Wait] = {}
        self._wanting: dict[str, _Wait] = {}
        # Chunks that this step's lookups found, by request.
        self._found: dict[str, list[bytes]] = {}
        self._room_queue: dict[str, _Wait] = {}
        self._step = 0

    # --- a step's lookups ---

    def must_wait(
        self,
        req_id: str,
        computed_tokens: int,
        compute_s: float,
        chunk_s: float,
        *,
        others: int = 0,
    ) -> bool:
        """Whether the request still waits, so that its lookups would have the same results.

        ``computed_tokens`` is how many tokens of its prompt the GPU has; ``compute_s`` how long
        computing the rest would take, and ``chunk_s`` a chunk of it. ``others`` is the number of
        other requests whose prompts are not computed yet. If it does not wait, all of it must be
        looked up.
        """
        wait = self._waits.setdefault(req_id, _Wait(req_id))
        has_moved = wait.computed_tokens not in (None, computed_tokens)
        wait.computed_tokens = computed_tokens
        wait.compute_s, wait.chunk_s = (1 + others) * compute_s, (1 + others) * chunk_s
        wait.asked_in_step = self._step
        if not wait.is_deferred:
            wait.began_s = None  # that wait has ended; after a preemption another one begins
        elif self._has_to_come(wait) and not self._runs_out(wait) and not has_moved:
            return True
        wait.is_deferred = False
        return False

    def _has_to_come(self, wait: _Wait) -> bool:
        if wait.was_refused:
            self._room_queue.setdefault(wait.holder, wait)
        return wait.holder in self._room_queue or not all(each.done for each in wait.under_way)

    def _runs_out(self, wait: _Wait) -> bool:
        """Whether a deferred request stops waiting, since computing is faster now.

        It then leaves the queue for room, and the reads that nobody else waits for are given up.
        """
        assert wait.began_s is not None
        longest_s = min(wait.worth_s + _GRACE_S, _LONGEST_S)
        if (
            self._clock() - wait.began_s >= longest_s
            or not self._finds_room(wait)
            or (self._is_late(wait) and not self._cut(wait))
        ):
            wait.is_over = True
            self._room_queue.pop(wait.holder, None)
            self._engine.leave(wait.chunks, wait.holder, keep_ready=True)
        return wait.is_over

    def _finds_room(self, wait: _Wait) -> bool:
        """Whether a request has no need of room, or finds it in time for at least some chunks."""
        if wait.holder not in self._room_queue or self._engine.may_promote():
            return True
        lacking = sum(each.counts.pending + each.counts.missing for each in wait.under_way)
        worth_s = wait.computing_s(lacking if wait.under_way else len(wait.chunks))
        if self._engine.room_s() < worth_s:
            return True
        wait.is_cramped = True
        del self._room_queue[wait.holder]
        return not all(each.done for each in wait.under_way)

    def _is_late(self, wait: _Wait) -> bool:
        """Whether what has not come may be computed faster: all of it, or the end of it."""
        pending = [each for each in wait.under_way if not each.done]
        arrival_s = max(map(self._engine.arrival_s, pending), default=0.0)
        lacking = sum(each.counts.pending for each in pending)
        return bool(pending) and arrival_s >= wait.computing_s(lacking)

    def _cut(self, wait: _Wait) -> bool:
        """Wait for the prefix alone that still comes faster; False if there is none."""
        count, lacking = self._paying(wait)
        self._give_up(wait, count)
        return lacking > 0

    def _paying(self, wait: _Wait) -> tuple[int, int]:
        """Return how many chunks come before they would be computed, and how many are not ready.

        The prefix is chosen for which loading it and computing the rest takes least time.
        """
        arrivals = self._engine.arrivals(wait.chunks)
        first = next((i for i, each in enumerate(arrivals) if each is not None), len(arrivals))
        best, best_s, latest_s = first, 0.0, 0.0
        for count, each in enumerate(arrivals[first:], 1):
            latest_s = max(latest_s, each or 0.0)
            gained_s = wait.computing_s(count) - latest_s
            # The chunks of a window are of use together.
            is_choice = not wait.looks_back or first + count == len(arrivals)
            if is_choice and gained_s > 0.0 and gained_s >= best_s:
                best, best_s = first + count, gained_s
        return best, best - first

    def _give_up(self, wait: _Wait, count: int) -> None:
        """Compute the chunks from number ``count`` on."""
        rest = wait.chunks[count:]
        if rest:
            wait.given_up.update(rest)
            wait.chunks = wait.chunks[:count]
            self._engine.leave(rest, wait.holder, keep_ready=True)
            self._engine.measure_again(rest)

    def want(self, req_id: str, chunk: bytes, tier: str | None, position: int) -> bool:
        """Have a chunk that is below the pool, or on its way, promoted at the step's end.

        Returns whether the request waits for it: not a second time for a chunk that did not come
        or did not stay, and not for one that is computed faster. ``tier``: None for a chunk on its
        way. ``position`` is the chunk's place in the request.
        """
        wait = self._waits.setdefault(req_id, _Wait(req_id))
        wait.asked_in_step = self._step
        if wait.is_over or chunk in wait.given_up:
            return False
        promotion = wait.promotions.get(chunk)
        # Without a promotion it was ready when the step ended that first wanted it.
        is_pending = req_id in self._wanting if promotion is None else not promotion.done
        if chunk not in wait.tiers:
            wait.looks_back |= req_id in self._wanting and position < wait.last_position
            wait.last_position = position
            wait.tiers[chunk] = tier
            self._wanting[req_id] = wait
        elif not is_pending and req_id not in self._room_queue:
            return False
        if wait.began_s is None:
            wait.began_s = self._clock()
        wait.is_deferred = True
        self.found(req_id, chunk)
        return True

    def found(self, req_id: str, chunk: bytes) -> None:
        """Note that a chunk is ready: promoting the chunks behind it must not evict it."""
        self._found.setdefault(req_id, []).append(chunk)

    def found_for(self, req_id: str) -> Sequence[bytes]:
        return self._found.get(req_id, ())

    def tier_of(self, req_id: str, chunk: bytes) -> str | None:
        """Return the tier where a request's chunk was found below the pool, if it was."""
        wait = self._waits.get(req_id)
        return None if wait is None else wait.tiers.get(chunk)

    # --- a step's end ---

    def end_step(self) -> None:
        """Promote the chunks that the step's lookups found below the pool."""
        for req_id, wait in self._wanting.items():
            wait.chunks = self._found[req_id]
            wait.worth_s = wait.computing_s(len(wait.chunks))
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
        """Promote the chunks that pay; the request joins the queue if some found no room."""
        count, lacking = self._paying(wait)
        self._give_up(wait, count)
        wait.worth_s = wait.computing_s(lacking)
        # A promotion ends at the first gap; with a window the chunks behind a gap are useful.
        parts = [[each] for each in wait.chunks] if wait.looks_back else [wait.chunks]
        wait.under_way = [self._promote_part(wait, part) for part in parts] if lacking else []
        if wait.was_refused:
            self._room_queue.setdefault(wait.holder, wait)
        else:
            self._room_queue.pop(wait.holder, None)

    def _promote_part(self, wait: _Wait, chunks: list[bytes]) -> Promotion:
        promotion = self._engine.promote(
            chunks, pin_s=self._pin_s, holder=wait.holder, is_demand=True
        )
        wait.promotions.update(dict.fromkeys(chunks, promotion))
        # A caller that is woken by a refusal asks again at once, and is refused again, for as long
        # as the pins of others last. Room is asked for once a step.
        was_refused_at_once = promotion.done and promotion.was_refused
        if self._on_promoted is not None and not was_refused_at_once:
            promotion.add_done_callback(self._on_promoted)
        return promotion

    # --- the end ---

    def end(self, req_id: str) -> None:
        """Forget a request; end the pins that it did not use, and its reads that have not begun."""
        wait = self._waits.pop(req_id, None)
        self._wanting.pop(req_id, None)
        self._found.pop(req_id, None)
        self._room_queue.pop(req_id, None)
        if wait is not None and wait.promotions:
            self._engine.leave(list(wait.promotions), req_id)

    def clear(self) -> None:
        """Forget all requests, as the pool has forgotten its chunks."""
        self._waits.clear()
        self._wanting.clear()
        self._found.clear()
        self._room_queue.clear()
