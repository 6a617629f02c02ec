"""Calls about more chunks than are decided about at once: the same answers, whatever is between."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cacheengine.residency.decisions import PORTION, Presence
from cacheengine.tiers.tier import GetOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import (
    Bench,
    InterruptedLock,
    config,
    key,
    keys,
    payload,
    tier_stack,
    wait_until,
)
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier

CHUNKS = 3 * PORTION
PREFIX = keys(*range(CHUNKS))


def _between(bench: Bench, after: int, meanwhile: Callable[[], object]) -> None:
    """Do something once, after this many holds of the lock by calls to the engine."""
    InterruptedLock(bench.engine, after, meanwhile)


def _disk_of(chunks: Sequence[bytes]) -> ScriptedTier:
    tier = ScriptedTier(items=2000, held=list(chunks))
    tier.chunks = {chunk: payload(chunk) for chunk in chunks}
    return tier


def test_all_are_held_or_none(make_bench: MakeBench) -> None:
    bench = make_bench(CHUNKS)
    bench.store(PREFIX)
    bench.promote(PREFIX, pin_s=10.0, holder="one")
    last = PREFIX[-1:]
    _between(bench, 2, lambda: bench.engine.clear(["cpu"], last))
    with pytest.raises(KeyError):
        bench.engine.hold(PREFIX, holder="one")
    # The pins have not ended: only what they do not keep can leave.
    kept = CHUNKS * 3 // 4
    assert len(bench.store(keys(*range(1000, 1000 + CHUNKS))) or ()) == CHUNKS - kept
    with pytest.raises(KeyError):
        bench.engine.release(PREFIX[:1])
    assert len(set(bench.engine.hold(PREFIX[:kept], holder="one"))) == kept
    bench.engine.release(PREFIX[:kept])


def test_a_chunk_cleared_while_a_later_one_is_being_held_keeps_its_slot(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(CHUNKS)
    bench.store(PREFIX)
    _between(bench, 1, lambda: bench.engine.clear(["cpu"], PREFIX[:1]))
    slots = bench.engine.hold(PREFIX)
    assert bench.engine.lookup(PREFIX[0]) is Presence.MISS
    assert bench.store(keys(1000)) is None
    assert bytes(bench.pool.view(slots[0])) == payload(PREFIX[0])
    bench.engine.release(PREFIX)
    assert bench.store(keys(1000)) is not None


def test_of_more_than_find_room_the_leading_ones_are_stored(make_bench: MakeBench) -> None:
    bench = make_bench(PORTION + 5)
    bench.store(keys(1000, 1001))
    bench.engine.hold(keys(1000))
    reservation = bench.engine.prepare_store(PREFIX)
    assert reservation is not None
    assert reservation.keys == tuple(PREFIX[: PORTION + 4])
    assert reservation.refused == tuple(PREFIX[PORTION + 4 :])
    assert reservation.evicted == tuple(keys(1001))
    assert bench.engine.stats().store_drops == len(reservation.refused)
    assert bench.engine.prepare_store(keys(*range(2000, 2000 + CHUNKS))) is None
    bench.engine.complete_store(reservation.keys)
    bench.engine.release(keys(1000))


def test_a_store_leaves_its_first_chunk_the_most_recent(make_bench: MakeBench) -> None:
    bench = make_bench(CHUNKS)
    bench.store(PREFIX)
    reservation = bench.engine.prepare_store(keys(*range(1000, 1000 + CHUNKS - 1)))
    assert reservation is not None
    assert reservation.evicted == tuple(PREFIX[:0:-1])
    bench.engine.complete_store(reservation.keys, success=False)


def test_the_leading_chunks_are_put_first(make_bench: MakeBench) -> None:
    tier = ScriptedTier(items=CHUNKS)
    # One writer: of two, the one with a later batch may be the first to end it.
    bench = make_bench(CHUNKS, replace(config(), disk_write_threads=1), tier=tier)
    bench.store(PREFIX)
    bench.finish_puts()
    assert list(tier.chunks) == PREFIX


def test_a_store_that_is_cleared_before_its_puts_are_queued(make_bench: MakeBench) -> None:
    tier = ScriptedTier(items=CHUNKS)
    bench = make_bench(CHUNKS, tier=tier)
    # Three portions are looked at, three published; then all is cleared.
    _between(bench, 3 + 3 + 3 + 1, lambda: bench.engine.clear(["cpu"]))
    bench.store(PREFIX)
    bench.finish_puts()
    assert bench.engine.match(PREFIX[:1]) == []
    wait_until(lambda: bench.engine.stats().cpu_used_bytes == 0)


def test_a_promotion_ends_at_the_first_chunk_without_room(make_bench: MakeBench) -> None:
    bench = make_bench(CHUNKS, tier=_disk_of(PREFIX))
    assert bench.promote(PREFIX) == (0, CHUNKS * 3 // 4, CHUNKS // 4)
    assert bench.promote(PREFIX) == (CHUNKS * 3 // 4, 0, CHUNKS // 4)


def test_much_that_is_pinned_before_the_first_that_may_leave(make_bench: MakeBench) -> None:
    """Pinned chunks are not met by the search for room."""
    slots = 1200
    bench = make_bench(slots, tier=_disk_of(keys(*range(5000, 5050))))
    bench.store(keys(*range(slots)))
    bench.finish_puts()
    bench.promote(keys(*range(300, slots)), pin_s=10.0)
    # The rest is more recent than all that is pinned.
    bench.engine.touch(keys(*range(300)))
    assert bench.promote(keys(*range(5000, 5050)), pin_s=0.0) == (0, 50, 0)
    assert len(bench.store(keys(*range(6000, 6100))) or ()) == 100
    assert bench.engine.match(keys(*range(300, slots))) == ["cpu"] * 900


def test_a_remote_tier_is_asked_for_a_long_prefix_at_once(make_bench: MakeBench) -> None:
    remote = ScriptedRemote()
    remote.chunks = {chunk: payload(chunk) for chunk in PREFIX[:-1]}
    bench = make_bench(2 * CHUNKS, remote=remote)
    promotion = bench.engine.promote(PREFIX, pin_s=10.0)
    assert promotion.wait(20)
    assert promotion.counts.promoted == CHUNKS - 1
    assert bench.engine.stats().remote.asked == CHUNKS


def test_an_answer_that_comes_before_a_promotion_waits_for_it(make_bench: MakeBench) -> None:
    remote = ScriptedRemote()
    remote.chunks = {chunk: payload(chunk) for chunk in PREFIX}
    bench = make_bench(2 * CHUNKS, remote=remote)

    # The job of an earlier question takes along what the promotion has asked for so far.
    answer = tier_stack(bench.engine).io[1]._ask_turn
    # After its touches, the look at the pins, and the first portion of its questions.
    _between(bench, 3 + 1 + 1, answer)
    promotion = bench.engine.promote(PREFIX, pin_s=10.0)
    wait_until(lambda: bench.engine.stats().remote.asked >= PORTION)
    assert promotion.wait(20)
    assert promotion.counts.promoted == CHUNKS


def test_reads_that_fail_end_a_long_promotion(make_bench: MakeBench) -> None:
    tier = _disk_of(PREFIX)
    tier.get_outcome = GetOutcome.DAMAGED
    bench = make_bench(2 * CHUNKS, tier=tier)
    assert bench.promote(PREFIX) == (0, 0, CHUNKS)


def test_operators_pins_are_counted_from_the_first_chunk_on(make_bench: MakeBench) -> None:
    bench = make_bench(CHUNKS)
    bench.store(PREFIX)
    assert bench.engine.pin([*PREFIX, key(1000)], "cpu") == CHUNKS // 2
    assert bench.engine.held_in([*PREFIX, key(1000)], "cpu") == CHUNKS
    assert bench.engine.unpin([*PREFIX, key(1000)], "cpu") == CHUNKS // 2
    assert bench.engine.clear(["cpu"], [*PREFIX, *PREFIX, key(1000)]) == {"cpu": CHUNKS}


def test_many_pins_end(make_bench: MakeBench) -> None:
    bench = make_bench(CHUNKS)
    bench.store(PREFIX)
    bench.promote(PREFIX[: CHUNKS // 2], pin_s=5.0)
    bench.clock.advance(6.0)
    assert bench.engine.expire_pins() == CHUNKS // 2
    assert bench.engine.expire_pins() == 0
