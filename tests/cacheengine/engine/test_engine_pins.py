"""Operators' pins, and how much of the pool pins of either kind may take."""

from dataclasses import replace
from pathlib import Path

import pytest

from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import GetOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, keys, payload
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier


def test_a_pinned_chunk_stays_until_it_is_unpinned(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1, 2))
    assert bench.engine.pin(keys(1, 2, 3), "cpu") == 2
    bench.engine.hold(keys(1))  # a use does not end it
    bench.engine.release(keys(1))
    bench.store(keys(4, 5, 6, 7))
    assert bench.engine.match(keys(1, 2)) == ["cpu", "cpu"]
    assert bench.engine.unpin(keys(1, 2, 3), "cpu") == 2
    assert bench.engine.unpin(keys(1, 2, 3), "cpu") == 0
    bench.store(keys(8, 9, 10, 11))
    assert bench.engine.match(keys(1)) == []


def test_half_of_the_pool_can_be_pinned(make_bench: MakeBench) -> None:
    bench = make_bench(5)
    bench.store(keys(1, 2, 3, 4, 5))
    assert bench.engine.pin(keys(1, 2, 3, 4), "cpu") == 2
    assert bench.engine.pin(keys(1, 2), "cpu") == 2  # again is no more than once
    assert bench.engine.pin(keys(3), "cpu") == 0
    assert len(bench.store(keys(6, 7, 8, 9)) or ()) == 3


def test_clear_ends_pins(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1, 2))
    bench.engine.pin(keys(1), "cpu")
    assert bench.engine.clear(["cpu"], keys(1)) == {"cpu": 1}
    bench.store(keys(1))
    assert bench.engine.pin(keys(1), "cpu") == 1
    bench.engine.clear()
    assert bench.store(keys(5, 6)) == tuple(keys(5, 6))
    assert bench.engine.pin(keys(5), "cpu") == 1


def test_a_promotions_pin_and_an_operators_do_not_end_each_other(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store(keys(1))
    bench.engine.pin(keys(1), "cpu")
    bench.promote(keys(1), pin_s=5)
    bench.clock.advance(6)
    assert bench.engine.expire_pins() == 0  # never had one: half the pool is pinned already
    bench.engine.unpin(keys(1), "cpu")
    bench.promote(keys(1), pin_s=5)
    bench.engine.pin(keys(1), "cpu")
    bench.clock.advance(6)
    assert bench.engine.expire_pins() == 1
    bench.store(keys(2, 3))
    assert bench.engine.lookup(key(1)) is Presence.CPU


def test_without_local_cpu_a_pinned_chunk_stays_in_the_pool(make_bench: MakeBench) -> None:
    tier = ScriptedTier()
    tier.puts.clear()
    bench = make_bench(4, config(Path("unused"), local_cpu=False), tier=tier)
    bench.store(keys(1, 2))
    assert bench.engine.pin(keys(1), "cpu") == 1
    tier.puts.set()
    bench.finish_puts()
    assert bench.engine.match(keys(1, 2)) == ["cpu", "disk"]
    assert bench.engine.unpin(keys(1), "cpu") == 1
    assert bench.engine.match(keys(1, 2)) == ["disk", "disk"]


def test_a_chunk_pinned_on_disk_is_not_evicted_from_it(make_bench: MakeBench) -> None:
    tier = ScriptedTier(items=4)
    bench = make_bench(16, replace(config(), cache_policy="LRU"), tier=tier)
    bench.store(keys(1, 2, 3))
    bench.finish_puts()
    assert bench.engine.pin(keys(1, 2, 3), "disk") == 2  # half of four
    for number in range(10, 20):
        bench.store(keys(number))
        bench.finish_puts()
    assert bench.engine.held_in(keys(1, 2), "disk") == 2
    assert {key(1), key(2)} < set(tier.chunks)
    assert bench.engine.unpin(keys(1), "disk") == 1
    bench.engine.clear(["disk"], keys(2))
    for number in range(20, 30):
        bench.store(keys(number))
        bench.finish_puts()
    assert bench.engine.held_in(keys(1), "disk") == 0
    assert bench.engine.pin(keys(28, 29), "disk") == 2


def test_a_pin_does_not_keep_what_is_damaged(make_bench: MakeBench) -> None:
    tier = ScriptedTier(held=keys(1))
    tier.chunks = {key(1): payload(key(1))}
    bench = make_bench(4, tier=tier)
    assert bench.engine.pin(keys(1), "disk") == 1
    tier.get_outcome = GetOutcome.DAMAGED
    assert bench.promote(keys(1)) == (0, 0, 1)
    assert bench.engine.held_in(keys(1), "disk") == 0


def _prefetched(make_bench: MakeBench) -> Bench:
    """An engine that has promoted four chunks and holds four more."""
    tier = ScriptedTier(held=keys(1, 2, 3, 4))
    tier.chunks = {chunk: payload(chunk) for chunk in keys(1, 2, 3, 4)}
    bench = make_bench(8, tier=tier)
    bench.store(keys(5, 6, 7, 8))
    assert bench.promote(keys(1, 2, 3, 4), pin_s=10) == (0, 4, 0)
    return bench


def test_one_requests_use_does_not_end_the_pins_for_another(make_bench: MakeBench) -> None:
    bench = _prefetched(make_bench)
    bench.promote(keys(1, 2, 3, 4), pin_s=10, holder="another")
    bench.engine.hold(keys(1, 2, 3, 4), holder="one")
    bench.engine.release(keys(1, 2, 3, 4))
    bench.store(keys(*range(10, 18)))
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["cpu"] * 4
    bench.clock.advance(10)
    bench.store(keys(*range(20, 28)))
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["disk"] * 4


def test_a_use_ends_the_pin_of_one_prefetch(make_bench: MakeBench) -> None:
    """Two requests prefetched the chunks: they are kept until both have loaded them."""
    bench = _prefetched(make_bench)
    bench.promote(keys(1, 2, 3, 4), pin_s=10)
    bench.engine.hold(keys(1, 2, 3, 4), holder="one")
    bench.engine.release(keys(1, 2, 3, 4))
    bench.store(keys(*range(10, 18)))
    bench.finish_puts()
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["cpu"] * 4
    bench.engine.hold(keys(1, 2, 3, 4), holder="two")
    bench.engine.release(keys(1, 2, 3, 4))
    bench.store(keys(*range(20, 28)))
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["disk"] * 4


def test_a_pin_that_ran_out_is_not_owed_a_use(make_bench: MakeBench) -> None:
    """Its request never came: the next prefetch and its request are one pin and one use again."""
    bench = _prefetched(make_bench)
    bench.clock.advance(10)
    assert bench.engine.expire_pins() == 4
    bench.promote(keys(1, 2, 3, 4), pin_s=10)
    bench.engine.hold(keys(1, 2, 3, 4), holder="one")
    bench.engine.release(keys(1, 2, 3, 4))
    bench.store(keys(*range(20, 28)))
    assert bench.engine.match(keys(1, 2, 3, 4)) == ["disk"] * 4


def test_each_holders_pin_has_its_own_deadline(make_bench: MakeBench) -> None:
    bench = _prefetched(make_bench)
    bench.promote(keys(1), pin_s=20, holder="slow")
    bench.promote(keys(1), pin_s=5, holder="quick")
    bench.clock.advance(5)
    assert bench.engine.expire_pins() == 1
    bench.clock.advance(5)
    assert bench.engine.expire_pins() == 4  # of the prefetch
    bench.store(keys(*range(10, 18)))
    assert bench.engine.match(keys(1, 2)) == ["cpu", "disk"]
    bench.clock.advance(10)
    assert bench.engine.expire_pins() == 1
    assert bench.engine.stats().prefetch_unused_chunks == 4


def test_pins_asked_for_before_the_chunk_is_there_are_each_their_own(
    make_bench: MakeBench,
) -> None:
    tier = ScriptedTier(held=keys(1))
    tier.chunks = {key(1): payload(key(1))}
    tier.gets.clear()
    bench = make_bench(1, tier=tier)
    for holder in ("one", "two"):
        promotion = bench.engine.promote(keys(1), pin_s=10, holder=holder)
    tier.gets.set()
    assert promotion.wait(20)
    bench.engine.hold(keys(1), holder="one")
    bench.engine.release(keys(1))
    assert bench.store(keys(2)) is None
    bench.engine.hold(keys(1), holder="two")
    bench.engine.release(keys(1))
    assert bench.store(keys(2)) == tuple(keys(2))


@pytest.mark.parametrize("tier", ["remote", "disk"])
def test_nothing_is_pinned_where_it_cannot_be_kept(make_bench: MakeBench, tier: str) -> None:
    bench = make_bench(4, remote=ScriptedRemote())
    bench.store(keys(1))
    bench.finish_puts()
    assert bench.engine.held_in(keys(1), "remote") == 1
    assert bench.engine.pin(keys(1), tier) == 0
    assert bench.engine.unpin(keys(1), tier) == 0


def test_promotions_leave_stores_some_room(make_bench: MakeBench) -> None:
    """However much is prefetched, a quarter of the pool stays for stores."""
    tier = ScriptedTier(held=keys(*range(20)))
    tier.chunks = {chunk: payload(chunk) for chunk in keys(*range(20))}
    bench = make_bench(8, tier=tier)
    assert bench.promote(keys(*range(8))) == (0, 6, 2)
    assert bench.promote(keys(*range(10, 14))) == (0, 0, 4)
    assert bench.engine.stats().promote_drops == 2
    assert bench.store(keys(30, 31, 32)) == tuple(keys(30, 31))
    bench.clock.advance(11)  # the pins are over
    assert bench.promote(keys(*range(10, 14))) == (0, 4, 0)


def test_unpinned_promotions_may_use_the_whole_pool(make_bench: MakeBench) -> None:
    tier = ScriptedTier(held=keys(*range(8)))
    tier.chunks = {chunk: payload(chunk) for chunk in keys(*range(8))}
    bench = make_bench(8, tier=tier)
    assert bench.promote(keys(*range(8)), pin_s=0) == (0, 8, 0)


def test_clear_by_keys_drops_these_only(make_bench: MakeBench) -> None:
    tier = ScriptedTier()
    bench = make_bench(8, tier=tier)
    bench.store(keys(1, 2, 3))
    bench.finish_puts()
    assert bench.engine.clear(keys=keys(2, 9)) == {"cpu": 1, "disk": 1}
    assert bench.engine.match(keys(1, 3)) == ["cpu", "cpu"]
    assert bench.engine.match(keys(2)) == []
    assert bench.engine.clear(["disk"], keys(3)) == {"disk": 1}
    assert bench.engine.held_in(keys(3), "cpu") == 1


def test_clearing_a_chunk_on_disk_drops_its_queued_put(make_bench: MakeBench) -> None:
    tier = ScriptedTier()
    tier.puts.clear()
    bench = make_bench(8, tier=tier)
    bench.store(keys(1, 2, 3, 4))
    bench.engine.clear(["disk"], keys(3))
    tier.puts.set()
    bench.finish_puts()
    assert set(tier.chunks) == set(keys(1, 2, 4))


def test_a_reserved_slot_can_be_written_through_the_engine(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    reservation = bench.engine.prepare_store(keys(1))
    assert reservation is not None
    bench.engine.view(reservation.slots[0])[:] = payload(key(1))
    bench.engine.complete_store(keys(1))
    assert bench.has_right_bytes(keys(1))


def test_what_finds_no_room_is_refused_and_what_never_can_is_missing(
    make_bench: MakeBench,
) -> None:
    tier = ScriptedTier(held=keys(*range(1, 13)))
    tier.chunks = {chunk: payload(chunk) for chunk in keys(*range(1, 13))}
    bench = make_bench(8, tier=tier)
    assert bench.promote(keys(1, 2, 3), holder="a") == (0, 3, 0)
    assert bench.engine.may_promote()
    # Six of eight may be pinned, and three are: there will be room for the rest.
    refused = bench.engine.promote(keys(4, 5, 6, 7), pin_s=10, holder="b")
    assert refused.wait(20) and refused.was_refused
    assert not bench.engine.may_promote()
    bench.engine.leave(keys(1, 2, 3), "a")
    assert bench.engine.may_promote()
    # Beyond six of its own there will not.
    long = bench.engine.promote(keys(4, 5, 6, 7, 8, 9, 10), pin_s=10, holder="b")
    assert long.wait(20) and not long.was_refused
    assert (long.counts.resident, long.counts.promoted, long.counts.missing) == (3, 3, 1)
