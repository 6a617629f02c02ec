"""Requests that wait for chunks below the pool: how often they are looked up, and in which order.

`test_waiting_pays` says how long, with a real engine.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import cast

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.promotion_waits import PIN_S, PromotionWaits
from cacheengine.residency.decisions import Promotion, PromotionOutcome
from cacheengine.residency.pool_index import Holder
from tests.cacheengine.helpers import FakeClock, keys

COMPUTE_S = 2.0
CHUNK_S = 1.0


class Engine:
    """Tells of what it is asked, and promotes what the test says."""

    def __init__(self) -> None:
        self.room = 100
        self.has_room = True
        self.ready: set[bytes] = set()
        self.is_late = False
        self.promoted: list[tuple[Holder, list[bytes]]] = []
        self.promotions: list[Promotion] = []
        self.unpinned: list[tuple[Holder, list[bytes]]] = []

    def arrivals(self, keys: Sequence[bytes]) -> list[float | None]:
        return [None if each in self.ready else 100.0 * self.is_late for each in keys]

    def arrival_s(self, promotion: Promotion) -> float:
        return 100.0 * self.is_late

    def measure_again(self, keys: Sequence[bytes]) -> None:
        pass

    def promote(
        self,
        keys: Sequence[bytes],
        *,
        pin_s: float,
        holder: Holder = None,
        is_demand: bool = False,
    ) -> Promotion:
        assert pin_s == PIN_S and is_demand
        self.promoted.append((holder, list(keys)))
        promotion = Promotion(len(keys))
        taken = min(self.room, len(keys))
        self.room -= taken
        if len(keys) > taken:
            promotion.settle(PromotionOutcome.REFUSED, len(keys) - taken)
        self.promotions.append(promotion)
        return promotion

    def may_promote(self) -> bool:
        return self.has_room

    def room_s(self) -> float:
        return 0.0

    def leave(self, keys: Iterable[bytes], holder: str, *, keep_ready: bool = False) -> None:
        if not keep_ready:
            self.unpinned.append((holder, list(keys)))


class Scheduler:
    """Looks requests up as vLLM's does: each step all of them, each from its first chunk."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.clock = FakeClock()
        self.waits = PromotionWaits(cast("CacheEngine", self.engine), self.clock)

    def step(self, **requests: Sequence[bytes]) -> dict[str, bool]:
        """Look up requests' chunks, all on disk; return which of them wait."""
        waiting = {req_id: self.look_up(req_id, chunks) for req_id, chunks in requests.items()}
        self.waits.end_step()
        return waiting

    def must_wait(self, req_id: str, computed_tokens: int = 0) -> bool:
        return self.waits.must_wait(req_id, computed_tokens, COMPUTE_S, CHUNK_S)

    def look_up(self, req_id: str, chunks: Sequence[bytes]) -> bool:
        if self.must_wait(req_id):
            return True
        wants = [
            self.waits.want(req_id, chunk, "disk", position)
            for position, chunk in enumerate(chunks)
        ]
        return any(wants)

    def come(self, promotion: int = -1) -> None:
        """Have all come that a promotion waits for."""
        promoted = self.engine.promotions[promotion]
        promoted.settle(PromotionOutcome.PROMOTED, promoted.counts.pending)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_a_request_is_promoted_once_and_not_looked_up_until_it_has_come(
    scheduler: Scheduler,
) -> None:
    chunks = keys(1, 2, 3)
    assert scheduler.step(a=chunks) == {"a": True}
    assert scheduler.engine.promoted == [("a", chunks)]
    for _ in range(3):
        assert scheduler.must_wait("a")
        scheduler.waits.end_step()
    scheduler.come()
    assert not scheduler.must_wait("a")
    assert scheduler.waits.tier_of("a", chunks[1]) == "disk"
    # What came and did not stay is not waited for again.
    assert scheduler.step(a=chunks) == {"a": False}


def test_what_came_for_another_and_left_again_is_not_waited_for(scheduler: Scheduler) -> None:
    """It was ready at the step's end, so it was not promoted for this request, nor pinned."""
    chunks = keys(1)
    scheduler.engine.ready = {*chunks}
    assert scheduler.step(a=chunks) == {"a": True}
    assert not scheduler.engine.promoted
    assert scheduler.step(a=chunks) == {"a": False}


def test_what_the_gpu_computed_meanwhile_is_seen(scheduler: Scheduler) -> None:
    scheduler.step(a=keys(1, 2))
    assert scheduler.must_wait("a")
    assert not scheduler.must_wait("a", 256)


def test_a_chunk_on_its_way_for_another_is_waited_for_too(scheduler: Scheduler) -> None:
    first, last = keys(1, 2)
    assert scheduler.waits.want("a", first, None, 0)
    assert scheduler.waits.want("a", last, None, 1)
    scheduler.waits.end_step()
    assert scheduler.engine.promoted == [("a", [first, last])], "pinned when it comes"
    assert scheduler.must_wait("a")
    scheduler.come()
    assert not scheduler.must_wait("a")
    assert scheduler.waits.tier_of("a", last) is None


def test_a_tier_is_waited_for_no_longer_than_computing_takes(scheduler: Scheduler) -> None:
    chunks = keys(1, 2)
    scheduler.step(a=chunks)
    scheduler.clock.advance(COMPUTE_S + 0.2)
    assert scheduler.must_wait("a")
    scheduler.clock.advance(0.1)
    assert not scheduler.must_wait("a")
    assert scheduler.step(a=chunks) == {"a": False}, "it computes"
    assert not scheduler.waits.want("a", chunks[0], None, 0)


def test_a_tier_that_falls_behind_is_left(scheduler: Scheduler) -> None:
    chunks = keys(1, 2)
    scheduler.step(a=chunks)
    assert scheduler.must_wait("a")
    scheduler.engine.is_late = True
    assert not scheduler.must_wait("a")


def test_no_wait_is_longer_than_a_minute(scheduler: Scheduler) -> None:
    """While too few steps were seen, the time to compute is not known."""
    scheduler.step(a=keys(1))
    scheduler.waits = PromotionWaits(cast("CacheEngine", scheduler.engine), scheduler.clock)
    unknown = float("inf")
    assert not scheduler.waits.must_wait("a", 0, unknown, unknown)
    assert scheduler.waits.want("a", keys(1)[0], "disk", 0)
    scheduler.waits.end_step()
    scheduler.clock.advance(59.9)
    assert scheduler.waits.must_wait("a", 0, unknown, unknown)
    scheduler.clock.advance(0.2)
    assert not scheduler.waits.must_wait("a", 0, unknown, unknown)


def test_a_refused_promotion_is_asked_for_again_when_there_is_room(scheduler: Scheduler) -> None:
    chunks = keys(1, 2, 3)
    scheduler.engine.room = 1
    assert scheduler.step(a=chunks) == {"a": True}
    scheduler.come()
    scheduler.engine.has_room = False
    assert scheduler.step(a=chunks) == {"a": True}
    assert len(scheduler.engine.promoted) == 1, "no room, no call"
    scheduler.engine.has_room = True
    scheduler.engine.room = 3
    assert scheduler.step(a=chunks) == {"a": True}
    assert scheduler.engine.promoted[1:] == [("a", chunks)], "all of it: pins are renewed"
    scheduler.come()
    assert not scheduler.must_wait("a")


def test_a_promotion_that_was_refused_at_once_wakes_nobody() -> None:
    """A request that is woken asks again at once, and is refused again while others' pins last."""
    engine, woken = Engine(), list[None]()
    on_promoted = functools.partial(woken.append, None)
    waits = PromotionWaits(cast("CacheEngine", engine), FakeClock(), on_promoted=on_promoted)
    engine.room = 0
    waits.want("a", keys(1)[0], "disk", 0)
    waits.end_step()
    assert not waits.must_wait("b", 0, COMPUTE_S, CHUNK_S) and waits.must_wait(
        "a", 0, COMPUTE_S, CHUNK_S
    )
    assert len(engine.promoted) == 1 and not woken
    engine.room = 1
    waits.end_step()
    engine.promotions[-1].settle(PromotionOutcome.PROMOTED)
    assert len(woken) == 1


def test_one_at_a_time_asks_again_in_the_order_of_the_line(scheduler: Scheduler) -> None:
    """Two requests with half of their prompts pinned would wait for each other."""
    scheduler.engine.room = 1
    a, b, c = keys(1, 2), keys(3, 4), keys(5, 6)
    scheduler.step(a=a)
    scheduler.engine.has_room = False
    scheduler.step(a=a, b=b, c=c)
    assert [holder for holder, _ in scheduler.engine.promoted] == ["a"], "newcomers line up"
    scheduler.engine.has_room = True
    scheduler.engine.room = 100
    for count in (2, 3, 4):
        scheduler.step(c=c, b=b, a=a)
        assert len(scheduler.engine.promoted) == count
    assert [holder for holder, _ in scheduler.engine.promoted] == ["a", "a", "b", "c"]


def test_a_request_that_is_not_asked_for_keeps_no_other_from_room(scheduler: Scheduler) -> None:
    scheduler.engine.room = 0
    a, b = keys(1, 2), keys(3, 4)
    scheduler.step(a=a, b=b)
    scheduler.engine.room = 100
    scheduler.step(b=b)
    assert scheduler.engine.promoted[-1] == ("b", b)
    scheduler.step(a=a)
    assert scheduler.engine.promoted[-1] == ("a", a)


def test_a_window_is_promoted_chunk_by_chunk(scheduler: Scheduler) -> None:
    """It is looked up from its end, and a promotion ends at the first gap."""
    first, last = keys(1, 2)
    scheduler.waits.want("a", last, "disk", 512)
    scheduler.waits.want("a", first, "disk", 256)
    scheduler.waits.end_step()
    assert scheduler.engine.promoted == [("a", [last]), ("a", [first])]


def test_a_request_that_ends_gives_its_pins_back(scheduler: Scheduler) -> None:
    chunks = keys(1, 2)
    scheduler.engine.room = 1
    scheduler.step(a=chunks)
    scheduler.waits.end("a")
    assert scheduler.engine.unpinned == [("a", chunks)]
    scheduler.waits.end("a")
    scheduler.waits.end_step()
    assert len(scheduler.engine.promoted) == 1
    assert len(scheduler.engine.unpinned) == 1


def test_a_request_aborted_in_its_step_is_not_promoted(scheduler: Scheduler) -> None:
    scheduler.look_up("a", keys(1))
    scheduler.waits.end("a")
    scheduler.waits.end_step()
    assert scheduler.engine.promoted == []


def test_a_wait_after_a_preemption_is_another(scheduler: Scheduler) -> None:
    chunks = keys(1, 2)
    scheduler.step(a=chunks)
    scheduler.come()
    assert scheduler.step(a=chunks) == {"a": False}
    scheduler.clock.advance(100.0)
    assert not scheduler.must_wait("a")
    assert scheduler.waits.want("a", keys(3)[0], None, 2)
    scheduler.waits.end_step()
    assert scheduler.must_wait("a")


def test_what_is_in_the_pool_is_pinned_with_what_comes(scheduler: Scheduler) -> None:
    """Else what is promoted for others would push the prompt's beginning out meanwhile."""
    first, second, last = keys(1, 2, 3)
    scheduler.engine.ready = {first, last}
    scheduler.waits.found("a", first)
    scheduler.waits.want("a", second, "disk", 512)
    scheduler.waits.found("a", last)
    scheduler.waits.end_step()
    assert scheduler.engine.promoted == [("a", [first, second, last])]
    assert scheduler.waits.tier_of("a", first) is None
    scheduler.waits.found("b", first)
    scheduler.waits.end_step()
    assert len(scheduler.engine.promoted) == 1, "all of it is there"
