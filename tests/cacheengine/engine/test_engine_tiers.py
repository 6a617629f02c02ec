"""The engine and the tier below: puts, promotions, pins, failures."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, keys, payload, tier_stack, wait_until
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier


@pytest.fixture
def tier() -> Iterator[ScriptedTier]:
    scripted = ScriptedTier()
    yield scripted
    scripted.close()


def _bench(make_bench: MakeBench, tier: ScriptedTier, slots: int = 4, share: float = 1.0) -> Bench:
    return make_bench(slots, config(share=share), tier=tier)


def _on_disk(make_bench: MakeBench, tier: ScriptedTier, *numbers: int, slots: int = 4) -> Bench:
    """An engine that found these chunks on its disk at start."""
    tier.held_at_start = keys(*numbers)
    tier.chunks = {chunk: payload(chunk) for chunk in keys(*numbers)}
    return _bench(make_bench, tier, slots)


def test_a_stored_chunk_is_also_put(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _bench(make_bench, tier)
    bench.store(keys(1, 2))
    bench.finish_puts()
    assert tier.chunks == {chunk: payload(chunk) for chunk in keys(1, 2)}
    assert bench.engine.stats().lower_tiers.puts == 2


def test_what_is_being_put_is_not_evicted(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _bench(make_bench, tier, slots=2)
    tier.puts.clear()
    bench.store(keys(1, 2))
    assert bench.engine.prepare_store(keys(3)) is None
    tier.puts.set()
    bench.finish_puts()
    assert bench.store(keys(3)) == tuple(keys(3))
    bench.finish_puts()
    assert tier.chunks[key(1)] == payload(key(1))


def test_puts_beyond_the_queue_are_dropped_not_waited_for(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier, slots=4, share=0.5)
    tier.puts.clear()
    bench.store(keys(1, 2, 3, 4))
    assert bench.engine.stats().lower_tiers.put_drops == 2
    assert bench.engine.stats().put_queue_bytes == 2 * bench.pool.slot_bytes


def test_promotion_brings_the_right_bytes(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1, 2, 3)
    assert bench.engine.lookup(key(1)) is Presence.DISK
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["disk"] * 3
    assert bench.promote(keys(1, 2, 3)) == (0, 3, 0)
    assert bench.engine.match(keys(1, 2, 3)) == ["cpu"] * 3
    assert bench.has_right_bytes(keys(1, 2, 3))


def test_promotion_returns_before_the_read(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1)
    tier.gets.clear()
    promotion = bench.engine.promote(keys(1), pin_s=10)
    done = threading.Event()
    promotion.add_done_callback(done.set)
    assert promotion.counts.pending == 1
    assert not done.is_set()
    assert bench.engine.lookup(key(1)) is Presence.PENDING
    assert bench.engine.try_hold(key(1)) is None
    tier.gets.set()
    assert done.wait(20)
    assert promotion.counts.promoted == 1


def test_the_same_chunk_asked_twice_is_read_once(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1, 2)
    tier.gets.clear()
    first = bench.engine.promote(keys(1), pin_s=1)
    second = bench.engine.promote(keys(1, 2), pin_s=50)
    tier.gets.set()
    assert first.wait(20)
    assert second.wait(20)
    assert (first.counts.promoted, second.counts.promoted, tier.get_count) == (1, 2, 2)
    bench.clock.advance(10)
    assert bench.engine.expire_pins() == 0  # the longer pin counts


def test_promotion_stops_at_the_first_missing(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1, 3)
    assert bench.promote(keys(1, 2, 3)) == (0, 1, 2)
    assert bench.engine.lookup(key(3)) is Presence.DISK


def test_resident_chunks_count_as_such_and_are_pinned(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _on_disk(make_bench, tier, 2, slots=3)
    bench.store(keys(1))
    bench.finish_puts()
    assert bench.promote(keys(1, 2)) == (1, 1, 0)
    assert bench.store(keys(7, 8)) == tuple(keys(7))  # one slot is free, two are pinned


def test_a_store_under_way_is_joined(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _bench(make_bench, tier)
    bench.engine.prepare_store(keys(1, 2))
    promotion = bench.engine.promote(keys(1, 2), pin_s=10)
    assert promotion.counts.pending == 2
    bench.engine.complete_store(keys(1))
    bench.engine.complete_store(keys(2), success=False)
    assert (promotion.counts.resident, promotion.counts.missing, promotion.done) == (1, 1, True)


def test_promotion_does_not_evict_its_own_prefix(make_bench: MakeBench, tier: ScriptedTier) -> None:
    """The third chunk is the least recent in the pool when room for the first is wanted."""
    bench = _on_disk(make_bench, tier, 1, 2, slots=2)
    bench.store(keys(3))
    bench.finish_puts()
    assert bench.promote(keys(1, 2, 3)) == (0, 1, 2)
    assert bench.engine.lookup(key(3)) is Presence.CPU
    assert bench.engine.stats().promote_drops == 1


def test_a_pin_ends_at_its_deadline(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1, slots=1)
    bench.promote(keys(1), pin_s=10)
    bench.clock.advance(9.9)
    assert bench.store(keys(2)) is None
    bench.clock.advance(0.2)
    assert bench.store(keys(2)) == tuple(keys(2))
    stats = bench.engine.stats()
    assert (stats.pins_expired, stats.prefetch_unused_bytes) == (1, bench.pool.slot_bytes)


def test_a_pin_ends_with_the_use_of_its_holder(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1, slots=1)
    bench.promote(keys(1), pin_s=10, holder="request")
    assert bench.engine.try_hold(key(1)) is not None  # looking is not using
    bench.engine.release(keys(1))
    assert bench.store(keys(2)) is None
    bench.engine.hold(keys(1), holder="request")
    bench.engine.release(keys(1))
    assert bench.store(keys(2)) == tuple(keys(2))
    assert bench.engine.stats().pins_expired == 0
    assert bench.engine.stats().prefetch_unused_bytes == 0


def test_what_was_promoted_in_vain_is_counted_once(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    """When its pin ends, whether it is used later or evicted. A resident chunk cost nothing."""
    bench = _on_disk(make_bench, tier, 1, 2, 3, slots=6)
    bench.store(keys(4))
    bench.promote(keys(1, 2, 3, 4), pin_s=10, holder="request")
    bench.engine.hold(keys(1), holder="request")
    bench.engine.release(keys(1))
    bench.engine.clear(["cpu"], keys(2))
    assert bench.engine.stats().prefetch_unused_chunks == 1
    bench.clock.advance(10.1)
    assert bench.engine.expire_pins() == 2
    bench.engine.hold(keys(3))
    bench.engine.release(keys(3))
    bench.store(keys(5, 6, 7, 8, 9, 10))
    stats = bench.engine.stats()
    assert stats.prefetch_unused_chunks == 2
    assert stats.prefetch_unused_bytes == 2 * bench.pool.slot_bytes


@pytest.mark.parametrize("outcome", [GetOutcome.DAMAGED, GetOutcome.MISSING])
def test_a_chunk_that_is_gone_is_a_miss_from_then_on(
    make_bench: MakeBench, tier: ScriptedTier, outcome: GetOutcome
) -> None:
    """Else the scheduler would be told to retry for ever."""
    bench = _on_disk(make_bench, tier, 1)
    tier.get_outcome = outcome
    assert bench.promote(keys(1)) == (0, 0, 1)
    assert bench.engine.lookup(key(1)) is Presence.MISS
    assert bench.engine.stats().cpu_used_bytes == 0
    stats = bench.engine.stats()
    below = stats.lower_tiers
    assert (below.corrupt, below.io_errors, below.get_misses) == (
        outcome is GetOutcome.DAMAGED,
        0,
        outcome is GetOutcome.MISSING,
    )
    assert [(event.tier, event.stored) for event in bench.engine.take_events()] == [("disk", False)]


def test_a_read_that_fails_is_a_miss_for_a_while(make_bench: MakeBench, tier: ScriptedTier) -> None:
    """Nothing is proven against the chunk, so it stays, and is tried again later."""
    bench = _on_disk(make_bench, tier, 1)
    bench.engine.pin(keys(1), "disk")
    tier.get_outcome = GetOutcome.FAILED
    assert bench.promote(keys(1)) == (0, 0, 1)
    assert bench.engine.lookup(key(1)) is Presence.MISS
    assert (bench.engine.stats().cpu_used_bytes, bench.engine.stats().disk.io_errors) == (0, 1)
    assert bench.engine.take_events() == []
    assert bench.engine.held_in(keys(1), "disk") == bench.engine.unpin(keys(1), "disk") == 1
    tier.get_outcome = GetOutcome.OK
    bench.clock.advance(1)
    assert bench.engine.lookup(key(1)) is Presence.DISK
    assert bench.promote(keys(1)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(1))


def test_a_tier_that_raises_is_a_failed_tier(
    make_bench: MakeBench, tier: ScriptedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a bug in the tier")

    bench = _on_disk(make_bench, tier, 1)
    for name in ("get_many", "put_many", "delete"):
        monkeypatch.setattr(tier, name, broken)
    assert bench.promote(keys(1)) == (0, 0, 1)
    bench.store(keys(2))
    bench.finish_puts()
    assert bench.engine.stats().lower_tiers.io_errors == 2
    assert bench.has_right_bytes(keys(2))


def test_a_full_disk_stops_puts_for_a_while_and_nothing_else(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    # One writer: of two, the one with a later chunk may be the first to end.
    bench = make_bench(4, replace(config(), disk_write_threads=1), tier=tier)
    tier.put_outcome = PutOutcome.NO_SPACE
    bench.store(keys(1))
    bench.finish_puts()
    bench.store(keys(2))
    assert bench.engine.stats().put_queue_bytes == 0  # resting: not even queued
    stats = bench.engine.stats()
    assert (stats.disk.puts, stats.disk.put_drops, stats.disk.io_errors) == (0, 2, 1)
    assert bench.has_right_bytes(keys(1, 2))
    tier.put_outcome = PutOutcome.STORED
    bench.clock.advance(61)
    bench.store(keys(3))
    bench.finish_puts()
    assert list(tier.chunks) == keys(3, 1, 2)  # those refused come after it


def test_a_disk_smaller_than_its_limit_keeps_rotating(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier, slots=8)
    bench.store(keys(1))
    bench.finish_puts()
    bench.store(keys(2))
    bench.finish_puts()
    tier.put_outcome = PutOutcome.NO_SPACE
    bench.store(keys(3))
    bench.finish_puts()
    tier.put_outcome = PutOutcome.STORED
    bench.clock.advance(2)
    bench.store(keys(4))
    bench.finish_puts()
    # One left for each that came; the one that was refused came again.
    assert set(tier.chunks) == set(keys(3, 4))


def test_the_tier_never_holds_more_than_its_capacity(make_bench: MakeBench) -> None:
    tier = ScriptedTier(items=5)
    bench = _bench(make_bench, tier, slots=16)
    for number in range(40):
        bench.store(keys(number))
        if number % 4 == 0:
            bench.finish_puts()
    bench.finish_puts()
    assert tier.most_chunks <= 5
    assert bench.engine.stats().disk.evictions > 0
    wait_until(lambda: bench.engine.tier_info()["disk"].used_bytes == tier.capacity_bytes)


def test_what_was_too_much_at_start_is_deleted(make_bench: MakeBench) -> None:
    tier = ScriptedTier(items=2, held=keys(1, 2, 3))
    tier.chunks = {chunk: payload(chunk) for chunk in keys(1, 2, 3)}
    bench = _bench(make_bench, tier)
    assert set(tier.chunks) == set(keys(2, 3))
    assert bench.engine.match(keys(2, 3)) == ["disk", "disk"]
    assert bench.engine.lookup(key(1)) is Presence.MISS


def test_clearing_during_a_read_hides_what_it_brings(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _on_disk(make_bench, tier, 1, slots=1)
    tier.gets.clear()
    promotion = bench.engine.promote(keys(1), pin_s=10)
    wait_until(lambda: tier.get_count == 1)
    assert bench.engine.clear() == {"cpu": 0, "disk": 1}
    assert (promotion.counts.missing, promotion.done) == (1, True)
    assert bench.engine.prepare_store(keys(2)) is None  # the slot is being written to
    tier.gets.set()
    wait_until(lambda: bench.engine.stats().cpu_used_bytes == 0)
    wait_until(lambda: not tier.chunks)
    assert bench.engine.lookup(key(1)) is Presence.MISS


def test_clearing_during_a_put_leaves_nothing_behind(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier, slots=4)
    tier.puts.clear()
    bench.store(keys(1, 2, 3, 4))  # two writers: two are under way, two queued
    wait_until(lambda: bench.engine.tier_info()["disk"].used_bytes == 2 * tier.item_bytes)
    bench.engine.clear()
    bench.engine.check()
    tier.puts.set()
    bench.finish_puts()
    wait_until(lambda: bench.engine.tier_info()["disk"].used_bytes == 0)
    assert tier.chunks == {}
    assert bench.engine.stats().cpu_used_bytes == 0


def test_clearing_the_cpu_tier_alone_leaves_the_way_to_disk(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier)
    tier.puts.clear()
    bench.store(keys(1, 2, 3))
    assert bench.engine.clear(["cpu"]) == {"cpu": 3}
    tier.puts.set()
    bench.finish_puts()
    assert bench.engine.match(keys(1, 2, 3)) == ["disk"] * 3
    assert bench.promote(keys(1, 2, 3)) == (0, 3, 0)
    assert bench.has_right_bytes(keys(1, 2, 3))


def test_clearing_the_disk_tier_alone_leaves_the_pool(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier)
    bench.store(keys(1))
    bench.finish_puts()
    assert bench.engine.clear(["disk"]) == {"disk": 1}
    assert bench.engine.match(keys(1)) == ["cpu"]
    wait_until(lambda: not tier.chunks)


# --- a disk that hangs ---


def test_a_disk_that_hangs_keeps_only_the_slots_that_it_writes_to(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    """All slots were lost until the disk answered: reads that had not begun kept theirs."""
    bench = _on_disk(make_bench, tier, *range(100), slots=100)
    tier.gets.clear()
    prefetch = bench.engine.promote(keys(*range(75)), pin_s=0.0)
    wait_until(lambda: tier.get_count == 4)
    bench.clock.advance(6.0)
    bench.engine.expire_pins()
    assert bench.engine.stats().cpu_used_bytes == 4 * bench.pool.slot_bytes
    assert (prefetch.counts.missing, prefetch.counts.pending) == (71, 4)
    assert bench.engine.lookup(key(80)) is Presence.MISS, "nothing is read from it"
    assert bench.engine.promote(keys(80), pin_s=0.0).counts.missing == 1
    assert len(bench.store(keys(*range(200, 260))) or ()) == 60
    bench.engine.check()
    # What was begun ends in its own slot, and the disk is used again.
    tier.gets.set()
    assert prefetch.wait(20)
    assert prefetch.counts.promoted == 4
    bench.engine.expire_pins()
    assert bench.promote(keys(80)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(80, *range(200, 230)))


def test_the_remote_tier_is_asked_for_what_is_on_a_disk_that_hangs(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    tier.held_at_start = keys(*range(20))
    remote = ScriptedRemote({chunk: payload(chunk) for chunk in keys(*range(20))})
    bench = make_bench(40, config(), tier=tier, remote=remote)
    tier.gets.clear()
    promotion = bench.engine.promote(keys(*range(20)), pin_s=0.0)
    wait_until(lambda: tier.get_count == 4)
    bench.clock.advance(6.0)
    bench.engine.expire_pins()
    assert promotion.counts.pending == 4
    assert bench.engine.lookup(key(10)) is Presence.UNKNOWN, "the remote tier is asked"
    wait_until(lambda: bench.engine.lookup(key(10)) is Presence.REMOTE)
    assert bench.promote(keys(10)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(10))


def test_a_disk_that_hangs_in_writes_gives_the_slots_of_the_others_back(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier, slots=8)
    tier.puts.clear()
    bench.store(keys(*range(8)))
    wait_until(lambda: bench.engine.tier_info()["disk"].used_bytes == 2 * tier.item_bytes)
    assert bench.store(keys(*range(10, 16))) == tuple(keys(10, 11)), "six slots are in the queue"
    bench.clock.advance(11.0)
    assert bench.store(keys(*range(12, 18))) == tuple(keys(*range(12, 18)))
    assert bench.engine.stats().put_queue_bytes == 2 * bench.pool.slot_bytes
    tier.puts.set()
    bench.finish_puts()
    bench.engine.expire_pins()
    bench.finish_puts()
    assert {*keys(*range(12, 18))} <= tier.chunks.keys(), "tried again"
    assert all(tier.chunks[chunk] == payload(chunk) for chunk in tier.chunks)


def test_close_writes_what_is_queued(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _bench(make_bench, tier, slots=8)
    bench.store(keys(*range(8)))
    bench.engine.close()
    assert set(tier.chunks) == set(keys(*range(8)))


def test_close_is_bounded_when_the_disk_is_slow(
    make_bench: MakeBench, tier: ScriptedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until the writes under way have ended, on a machine that is busy.
    monkeypatch.setattr("cacheengine.engine.tier_io._LEAST_END_S", 20.0)
    bench = _bench(make_bench, tier, slots=8)
    tier.puts.clear()
    bench.store(keys(*range(8)))
    wait_until(lambda: bench.engine.tier_info()["disk"].used_bytes == 2 * tier.item_bytes)
    closing = threading.Thread(target=bench.engine.close, kwargs={"drain_s": 0.0})
    closing.start()
    wait_until(lambda: not tier_stack(bench.engine).io[0].is_writing)
    tier.puts.set()
    closing.join(20)
    assert len(tier.chunks) == 2  # those under way; the rest was given up
    assert bench.engine.stats().put_queue_bytes == 0


def test_close_keeps_the_order_of_the_chunks_on_disk(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier)
    bench.store(keys(1, 2))
    bench.engine.close()
    assert tier.saved is not None
    assert {*tier.saved} == {*keys(1, 2)}


def test_a_disk_that_hangs_while_its_index_is_written_takes_one_thread(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _bench(make_bench, tier)
    tier.saves.clear()
    bench.clock.advance(301)
    for number in range(4):
        bench.store(keys(number))
        wait_until(partial(tier.chunks.__contains__, key(number)))
    assert tier.saved is None
    bench.finish_puts()


def test_close_is_bounded_when_an_idle_disk_hangs(
    make_bench: MakeBench, tier: ScriptedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The index is written only if all threads have ended before.
    monkeypatch.setattr("cacheengine.engine.tier_io._LEAST_END_S", 3.0)
    bench = _bench(make_bench, tier)
    bench.store(keys(1))
    bench.finish_puts()
    tier.saves.clear()
    bench.engine.close(drain_s=0.1)
    assert tier.saved is None
    tier.saves.set()
    wait_until(lambda: tier.saved == keys(1))


def test_after_close_nothing_hangs(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = _on_disk(make_bench, tier, 1)
    bench.engine.prepare_store(keys(2))
    bench.engine.close()
    bench.engine.close()
    promotion = bench.engine.promote(keys(1), pin_s=1)
    assert promotion.wait(0)
    assert promotion.counts.missing == 1
    bench.engine.complete_store(keys(2))
    assert bench.engine.stats().put_queue_bytes == 0


def test_closing_takes_nothing_off_the_disk(make_bench: MakeBench, tier: ScriptedTier) -> None:
    """A read that was given up says nothing against the chunk."""
    bench = _on_disk(make_bench, tier, *range(16), slots=16)
    tier.gets.clear()
    promotion = bench.engine.promote(keys(*range(15)), pin_s=10)
    wait_until(lambda: tier.get_count > 0)
    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    wait_until(lambda: tier_stack(bench.engine).io[0].index.is_suspended("disk"))
    tier.gets.set()
    closing.join(20)
    assert promotion.done
    assert promotion.counts.missing > 0
    late = bench.engine.promote(keys(15), pin_s=1)
    assert (late.done, late.counts.missing) == (True, 1)
    assert set(tier.chunks) == set(keys(*range(16)))
    assert bench.engine.stats().lower_tiers.io_errors == 0


def test_who_follows_the_engine_cannot_break_it(make_bench: MakeBench, tier: ScriptedTier) -> None:
    def broken() -> None:
        raise RuntimeError("a bug of whoever follows")

    tier.capacity_bytes = 2 * tier.item_bytes
    bench = _on_disk(make_bench, tier, 1, 2, slots=8)
    bench.engine.add_event_listener(broken)
    called = threading.Event()
    promotion = bench.engine.promote(keys(1, 2), pin_s=10)
    promotion.add_done_callback(broken)
    promotion.add_done_callback(called.set)
    assert called.wait(20)
    bench.store(keys(3, 4, 5, 6))
    bench.finish_puts()
    assert bench.engine.stats().lower_tiers.puts == 4


def test_measured_speed_is_reported(make_bench: MakeBench, tier: ScriptedTier) -> None:
    import time

    bench = make_bench(4, config(), tier=tier, clock=time.perf_counter)
    bench.store(keys(1))
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    bench.promote(keys(1))
    info = bench.engine.tier_info()
    assert info["disk"].write_bytes_per_s > 0
    assert info["disk"].read_bytes_per_s > 0
    assert info["cpu"].capacity_bytes == 4 * bench.pool.slot_bytes


def test_no_disk_tier_is_reported_where_there_is_none(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    assert set(bench.engine.tier_info()) == {"cpu"}
    assert set(bench.engine.snapshot().tiers) == {"cpu"}
    bench.store(keys(1))
    assert bench.engine.stats().lower_tiers.put_drops == 0
