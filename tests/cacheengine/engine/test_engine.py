"""The engine's scheduler face: stores, holds, eviction, clearing."""

from pathlib import Path

import pytest

from cacheengine.residency.decisions import Presence
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import config, key, keys
from tests.cacheengine.scripted_tier import ScriptedTier


def test_a_chunk_is_visible_only_when_its_bytes_are_whole(make_bench: MakeBench) -> None:
    engine = make_bench(4).engine
    assert engine.lookup(key(1)) is Presence.MISS
    reservation = engine.prepare_store(keys(1))
    assert reservation is not None
    assert engine.lookup(key(1)) is Presence.PENDING
    assert engine.try_hold(key(1)) is None
    assert engine.match(keys(1)) == []
    engine.complete_store(reservation.keys)
    assert engine.lookup(key(1)) is Presence.CPU
    assert engine.match(keys(1, 2)) == ["cpu"]


def test_a_failed_store_leaves_nothing(make_bench: MakeBench) -> None:
    engine = make_bench(1).engine
    engine.prepare_store(keys(1))
    engine.complete_store(keys(1), success=False)
    assert engine.lookup(key(1)) is Presence.MISS
    assert engine.prepare_store(keys(2)) is not None
    engine.complete_store(keys(2))
    assert engine.stats().store_failures == 1


def test_only_what_is_not_there_or_pending_gets_a_slot(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1))
    bench.engine.prepare_store(keys(2))
    reservation = bench.engine.prepare_store(keys(4, 2, 3, 1, 4))
    assert reservation is not None
    assert reservation.keys == tuple(keys(4, 3))
    assert len(set(reservation.slots)) == 2
    nothing = bench.engine.prepare_store(keys(1, 2))
    assert nothing is not None
    assert (nothing.keys, nothing.slots, nothing.evicted) == ((), (), ())


def test_a_full_pool_evicts_the_least_recent_and_says_so(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.store(keys(1, 2, 3))
    bench.engine.touch(keys(3, 1))
    reservation = bench.engine.prepare_store(keys(4, 5))
    assert reservation is not None
    # 2 was not touched; of the prefix (3, 1) the end leaves before the beginning.
    assert reservation.evicted == tuple(keys(2, 1))
    assert bench.engine.lookup(key(2)) is Presence.MISS
    bench.engine.complete_store(keys(4, 5))
    assert bench.engine.stats().evictions == 2


def test_a_prefix_is_evicted_from_its_end(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.store(keys(1, 2, 3))
    bench.store(keys(4))
    assert bench.engine.match(keys(1, 2, 3)) == ["cpu", "cpu"]


def test_no_room_changes_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.store(keys(1, 2, 3))
    bench.engine.hold(keys(1, 2, 3))
    assert bench.engine.prepare_store(keys(4, 5)) is None
    assert bench.engine.match(keys(1, 2, 3)) == ["cpu"] * 3
    assert bench.engine.stats().store_drops == 2
    bench.engine.release(keys(1, 2, 3))


def test_what_finds_room_is_stored_from_the_beginning(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1, 2, 3))
    bench.engine.hold(keys(1, 2))
    assert bench.store(keys(4, 5, 6)) == tuple(keys(4, 5))  # a free slot, and that of 3
    assert bench.engine.stats().store_drops == 1
    bench.engine.release(keys(1, 2))


def test_storing_never_evicts_what_it_was_asked_to_store(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1, 2))
    assert bench.engine.prepare_store(keys(1, 2, 3)) is None
    assert bench.engine.match(keys(1, 2)) == ["cpu", "cpu"]


def test_of_more_than_the_pool_holds_the_beginning_is_stored(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    assert bench.store(keys(1, 2, 3, 4)) == tuple(keys(1, 2))


def test_holds_keep_bytes_and_slots(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1, 2))
    slots = bench.engine.hold(keys(1, 2))
    assert bench.engine.try_hold(key(1)) == slots[0]
    bench.engine.release(keys(1, 2))
    assert bench.store(keys(3, 4)) == tuple(keys(3))  # 1 is still held once
    bench.engine.release(keys(1))
    assert bench.store(keys(4)) == tuple(keys(4))


def test_hold_is_all_or_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1))
    with pytest.raises(KeyError, match="not ready"):
        bench.engine.hold(keys(1, 2))
    with pytest.raises(KeyError, match="not held"):
        bench.engine.release(keys(1))


def test_completing_what_was_not_prepared_is_refused(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1))
    for chunk in keys(1, 2):
        with pytest.raises(KeyError, match="not being stored"):
            bench.engine.complete_store([chunk])


def test_clear_hides_everything_and_leaves_bytes_in_use(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1, 2))
    (slot,) = bench.engine.hold(keys(1))
    content = bytes(bench.pool.view(slot))
    bench.engine.prepare_store(keys(3))
    assert bench.engine.clear() == {"cpu": 2, "disk": 0}
    for chunk in keys(1, 2, 3):
        assert bench.engine.lookup(chunk) is Presence.MISS
    bench.engine.check()
    # The row under a copy to the GPU is nobody else's until the copy ends.
    other = bench.engine.prepare_store(keys(4, 5))
    assert other is not None
    assert slot not in other.slots
    assert bytes(bench.pool.view(slot)) == content
    # What is still in use under the same key is not stored a second time.
    same = bench.engine.prepare_store(keys(1, 3))
    assert same is not None
    assert same.keys == ()
    bench.engine.release(keys(1))
    bench.engine.complete_store(keys(3))
    assert bench.engine.lookup(key(3)) is Presence.MISS
    bench.engine.complete_store(keys(4, 5), success=False)
    assert bench.engine.stats().cpu_used_bytes == 0


def test_without_local_cpu_the_pool_only_stages(make_bench: MakeBench) -> None:
    tier = ScriptedTier()
    bench = make_bench(4, config(Path("unused"), local_cpu=False), tier=tier)
    bench.store(keys(1, 2))
    bench.finish_puts()
    assert bench.engine.stats().cpu_used_bytes == 0
    assert bench.engine.match(keys(1, 2)) == ["disk", "disk"]
    # What is on disk is not stored again.
    assert bench.store(keys(1, 2)) == ()
    assert bench.promote(keys(1, 2), holder="request") == (0, 2, 0)
    assert bench.has_right_bytes(keys(1, 2))  # not the holder's use
    bench.engine.hold(keys(1, 2), holder="request")  # ends the pin, its release the stay
    bench.engine.release(keys(1, 2))
    assert bench.engine.stats().cpu_used_bytes == 0
    bench.promote(keys(1), pin_s=5.0)
    bench.clock.advance(6.0)
    assert bench.engine.expire_pins() == 1
    assert bench.engine.stats().cpu_used_bytes == 0


def test_statistics_say_what_happened(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1, 2))
    bench.engine.lookup(key(1))
    bench.engine.lookup(key(9))
    bench.engine.try_hold(key(2))
    stats = bench.engine.stats()
    assert (stats.lookups, stats.hits_cpu, stats.stores) == (3, 2, 2)
    assert stats.cpu_used_bytes == 2 * bench.pool.slot_bytes
    assert stats.cpu_held_bytes == bench.pool.slot_bytes
    bench.engine.release(keys(2))


def test_pool_and_layout_must_agree(make_bench: MakeBench) -> None:
    from cacheengine.engine.engine import CacheEngine
    from cacheengine.memory import Pool
    from tests.cacheengine.helpers import layout

    with pytest.raises(ValueError, match="slots have 100 bytes"):
        CacheEngine(config(), layout(), Pool.allocate(2, 100))
