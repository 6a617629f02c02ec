"""The engine and a tier that it shares with others: questions, promotions, vanishing chunks."""

from collections.abc import Iterator

import pytest

from cacheengine.engine.tier_io import IoThreads
from cacheengine.residency.decisions import Presence
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, keys, payload, tier_stack, wait_until
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier
from warmroute_common.agent_protocol import unpack_keys


@pytest.fixture
def remote() -> Iterator[ScriptedRemote]:
    scripted = ScriptedRemote()
    yield scripted
    scripted.close()


def _put_by_others(remote: ScriptedRemote, *numbers: int) -> None:
    remote.chunks.update({chunk: payload(chunk) for chunk in keys(*numbers)})


def _look(bench: Bench, number: int) -> Presence:
    """Look a chunk up until it is known where it is."""
    wait_until(lambda: bench.engine.lookup(key(number)) is not Presence.UNKNOWN)
    return bench.engine.lookup(key(number))


def _tiers(bench: Bench) -> dict[str, int]:
    return {
        tier: len(unpack_keys(packed)) for tier, packed in bench.engine.snapshot().tiers.items()
    }


def test_a_stored_chunk_is_put_to_every_lower_tier(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    tier = ScriptedTier()
    bench = make_bench(4, tier=tier, remote=remote)
    bench.store(keys(1, 2))
    bench.finish_puts()
    assert tier.chunks == remote.chunks == {chunk: payload(chunk) for chunk in keys(1, 2)}
    stats = bench.engine.stats()
    assert (stats.disk.puts, stats.remote.puts, stats.lower_tiers.puts) == (2, 2, 4)
    assert _tiers(bench) == {"cpu": 2, "disk": 2, "remote": 2}
    assert remote.questions == []


def test_one_tier_that_is_stuck_does_not_stop_the_other(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    tier = ScriptedTier()
    bench = make_bench(4, tier=tier, remote=remote)
    remote.puts.clear()
    bench.store(keys(1, 2))
    wait_until(lambda: bench.engine.stats().disk.puts == 2)
    wait_until(lambda: sum(remote.put_batches) == 2)
    assert bench.engine.stats().cpu_held_bytes == 2 * bench.pool.slot_bytes  # both are still read
    remote.put_outcome = PutOutcome.FAILED
    remote.puts.set()
    bench.finish_puts()
    bench.store(keys(3))
    bench.finish_puts()
    stats = bench.engine.stats()
    assert (stats.disk.puts, stats.disk.put_drops) == (3, 0)
    assert (stats.remote.puts, stats.remote.put_drops, stats.remote.io_errors) == (0, 3, 2)


def test_what_another_engine_put_is_found_and_loaded(make_bench: MakeBench) -> None:
    server: dict[bytes, bytes] = {}
    first = make_bench(4, remote=ScriptedRemote(server))
    second = make_bench(4, remote=ScriptedRemote(server))
    first.store(keys(1, 2, 3))
    first.finish_puts()
    assert second.engine.match(keys(1, 2, 3)) == []  # nobody has asked yet
    assert second.engine.lookup(key(1)) is Presence.UNKNOWN
    assert _look(second, 1) is Presence.REMOTE
    assert second.engine.match(keys(1, 2, 3)) == ["remote"]
    assert second.promote(keys(1, 2, 3, 4)) == (0, 3, 1)
    assert second.engine.match(keys(1, 2, 3)) == ["cpu"] * 3
    assert second.engine.held_in(keys(1, 2, 3, 4), "remote") == 3
    assert second.has_right_bytes(keys(1, 2, 3))
    assert second.engine.stats().remote.gets == 3


def test_a_promotion_asks_for_all_that_follows_at_once(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    tier = ScriptedTier(held=keys(2))
    tier.chunks = {key(2): payload(key(2))}
    bench = make_bench(8, tier=tier, remote=remote)
    bench.store(keys(1))
    bench.finish_puts()
    _put_by_others(remote, 3, 4, 6)
    remote.finds.clear()
    promotion = bench.engine.promote(keys(1, 2, 3, 4, 5, 6), pin_s=10)
    wait_until(lambda: promotion.counts.promoted == 1)
    assert (promotion.counts.resident, promotion.counts.pending, promotion.counts.missing) == (
        1,
        4,
        0,
    )
    remote.finds.set()
    assert promotion.wait(20)
    assert remote.questions == [keys(3, 4, 5, 6)]
    # 6 is there, but behind a gap.
    assert (promotion.counts.resident, promotion.counts.promoted, promotion.counts.missing) == (
        1,
        3,
        2,
    )
    assert bench.engine.match(keys(1, 2, 3, 4, 5)) == ["cpu"] * 4
    assert bench.has_right_bytes(keys(1, 2, 3, 4))


def test_all_lookups_of_a_moment_go_in_one_question(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(8, remote=remote)
    remote.finds.clear()
    bench.engine.lookup(key(0))
    wait_until(lambda: len(remote.questions) == 1)
    for number in range(1, 40):
        assert bench.engine.lookup(key(number)) is Presence.UNKNOWN
    remote.finds.set()
    wait_until(lambda: bench.engine.lookup(key(39)) is Presence.MISS)
    assert remote.questions == [keys(0), keys(*range(1, 40))]
    stats = bench.engine.stats()
    assert (stats.remote.asked, stats.remote.found) == (40, 0)


def test_an_absent_chunk_is_asked_for_again_after_a_while(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    assert _look(bench, 1) is Presence.MISS
    _put_by_others(remote, 1)
    assert bench.promote(keys(1)) == (0, 0, 1)
    bench.clock.advance(2)
    assert bench.promote(keys(1)) == (0, 1, 0)


def test_a_chunk_that_the_server_evicted_is_a_miss(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    bench.store(keys(1, 2))
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    bench.engine.take_events()
    del remote.chunks[key(2)]
    assert bench.engine.match(keys(1, 2)) == ["remote"] * 2
    assert bench.promote(keys(1, 2)) == (0, 1, 1)
    assert bench.engine.lookup(key(2)) is Presence.MISS
    told = [(event.tier, event.stored, event.keys) for event in bench.engine.take_events()]
    assert ("remote", False, tuple(keys(2))) in told
    assert bench.engine.stats().remote.get_misses == 1
    # It is stored and put again as if it had never been there.
    bench.store(keys(2))
    bench.finish_puts()
    assert remote.chunks[key(2)] == payload(key(2))


def test_found_chunks_are_news(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    _put_by_others(remote, 1)
    bench = make_bench(4, remote=remote)
    assert _look(bench, 1) is Presence.REMOTE
    told = [(event.tier, event.stored, event.keys) for event in bench.engine.take_events()]
    assert told == [("remote", True, tuple(keys(1)))]
    assert _tiers(bench) == {"cpu": 0, "remote": 1}


def _wait_for_questions(remote: ScriptedRemote, count: int) -> None:
    wait_until(lambda: len(remote.questions) == count)


def test_a_dead_remote_is_a_miss_and_is_left_alone(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    remote.answers = False
    assert bench.promote(keys(1, 2)) == (0, 0, 2)
    assert bench.engine.lookup(key(3)) is Presence.MISS
    assert bench.promote(keys(3)) == (0, 0, 1)
    assert len(remote.questions) == 1
    # No request finds out whether it is well again: a ping does.
    for number in range(2, 5):
        bench.clock.advance(1)
        assert bench.engine.lookup(key(3)) is Presence.MISS
        assert len(remote.questions) == number - 1
        bench.engine.expire_pins()
        _wait_for_questions(remote, number)
    assert not {*keys(3)} & {*remote.questions[-1]}
    assert bench.engine.stats().remote.unanswered == 2
    remote.answers = True
    bench.clock.advance(1)
    bench.engine.expire_pins()
    wait_until(lambda: bench.engine.lookup(key(3)) is Presence.UNKNOWN)


def test_a_server_that_hangs_is_pinged_and_keeps_no_request(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    """8 of 66 requests waited 2 s each: the first after each pause was the one to find out."""
    bench = make_bench(4, remote=remote)
    remote.answers = False
    assert bench.promote(keys(1)) == (0, 0, 1)
    remote.finds.clear()
    for number in range(10, 50):
        bench.clock.advance(1.0)
        bench.engine.expire_pins()
        assert bench.engine.lookup(key(number)) is Presence.MISS
        assert bench.promote(keys(number)) == (0, 0, 1)
    wait_until(lambda: len(remote.questions) == 2)
    asker = tier_stack(bench.engine).io[1]._asker
    assert isinstance(asker, IoThreads)
    assert asker._jobs.qsize() <= 1, "they do not pile up"
    remote.answers = True
    remote.finds.set()
    wait_until(lambda: bench.engine.lookup(key(1)) is Presence.UNKNOWN)


def test_a_remote_that_hangs_keeps_no_request(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    remote.finds.clear()
    assert bench.engine.lookup(key(1)) is Presence.UNKNOWN
    bench.clock.advance(1.1)
    assert bench.engine.lookup(key(1)) is Presence.MISS
    assert bench.engine.lookup(key(2)) is Presence.MISS  # nor one that comes later


def test_looking_again_asks_for_no_more_work(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    """The scheduler looks all chunks of a waiting request up in each of its steps."""
    bench = make_bench(4, remote=remote)
    asker = tier_stack(bench.engine).io[1]._asker
    assert isinstance(asker, IoThreads)
    remote.finds.clear()
    bench.engine.lookup(key(0))
    wait_until(lambda: len(remote.questions) == 1)
    for _ in range(10):
        for number in range(20):
            assert bench.engine.lookup(key(number)) is Presence.UNKNOWN
    assert asker._jobs.qsize() == 1
    remote.finds.set()
    wait_until(lambda: bench.engine.lookup(key(19)) is Presence.MISS)


def test_a_read_that_fails_rests_the_remote(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    _put_by_others(remote, 1, 2)
    bench = make_bench(4, remote=remote)
    remote.get_outcome = GetOutcome.FAILED
    assert bench.promote(keys(1)) == (0, 0, 1)
    assert bench.engine.lookup(key(1)) is Presence.MISS
    assert bench.engine.match(keys(1)) == []
    assert bench.engine.stats().remote.io_errors == 1
    remote.get_outcome = GetOutcome.OK
    bench.clock.advance(1.1)
    bench.engine.expire_pins()
    wait_until(lambda: bench.engine.lookup(key(1)) is Presence.REMOTE)
    assert bench.promote(keys(1, 2)) == (0, 2, 0)


def test_a_tier_that_raises_is_a_failed_tier(
    make_bench: MakeBench, remote: ScriptedRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a bug in the tier")

    for name in ("find", "put_many", "get_many", "delete"):
        monkeypatch.setattr(remote, name, broken)
    bench = make_bench(4, remote=remote)
    bench.store(keys(1))
    bench.finish_puts()
    assert bench.promote(keys(1, 2)) == (1, 0, 1)
    assert (bench.engine.stats().remote.io_errors, bench.engine.stats().remote.unanswered) == (1, 1)


@pytest.mark.parametrize("outcome", [GetOutcome.DAMAGED, GetOutcome.FAILED, GetOutcome.MISSING])
def test_what_the_disk_does_not_give_comes_from_the_remote(
    make_bench: MakeBench, remote: ScriptedRemote, outcome: GetOutcome
) -> None:
    tier = ScriptedTier()
    bench = make_bench(4, tier=tier, remote=remote)
    bench.store(keys(1))
    bench.finish_puts()
    bench.engine.clear(["cpu"])
    assert bench.engine.match(keys(1)) == ["disk"]
    tier.get_outcome = outcome
    assert bench.promote(keys(1)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(1))
    bench.finish_puts()
    tier.get_outcome = GetOutcome.OK
    assert bench.engine.held_in(keys(1), "disk") == 1  # written there again
    assert tier.chunks == {key(1): payload(key(1))}


def test_clear_deletes_what_this_engine_knows(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    bench.store(keys(1, 2))
    bench.finish_puts()
    _put_by_others(remote, 3)
    assert bench.engine.clear() == {"cpu": 2, "disk": 0, "remote": 2}
    assert bench.engine.match(keys(1)) == []
    assert bench.engine.held_in(keys(1), "remote") == 0
    wait_until(lambda: set(remote.chunks) == set(keys(3)))
    assert _look(bench, 3) is Presence.REMOTE


def test_without_local_cpu_the_remote_alone_will_do(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, config(local_cpu=True), remote=remote)
    bench.engine._decider.state.local_cpu = False
    bench.store(keys(1, 2))
    bench.finish_puts()
    assert bench.engine.stats().cpu_used_bytes == 0
    assert bench.store(keys(1, 2)) == ()  # it is there
    assert bench.promote(keys(1, 2)) == (0, 2, 0)
    assert bench.has_right_bytes(keys(1, 2))


def test_a_prefix_is_read_in_batches_over_all_threads(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    remote.batch_chunks = 8
    _put_by_others(remote, *range(32))
    remote.gets.clear()
    bench = make_bench(64, remote=remote)
    promotion = bench.engine.promote(keys(*range(32)), pin_s=10)
    wait_until(lambda: len(remote.get_batches) == 4)
    remote.gets.set()
    assert promotion.wait(20)
    assert bench.promote(keys(*range(32))) == (32, 0, 0)
    assert remote.get_batches == [8] * 4  # by four readers
    assert bench.has_right_bytes(keys(*range(32)))


def test_queued_puts_are_drained_in_batches(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    remote.batch_chunks = 8
    remote.puts.clear()
    bench = make_bench(64, remote=remote)
    bench.store(keys(*range(64)))
    remote.puts.set()
    bench.finish_puts()
    assert len(remote.chunks) == 64
    assert max(remote.put_batches) == 8
    assert len(remote.put_batches) <= 12  # eight, and what is left is spread


def test_closing_answers_what_waits(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    bench = make_bench(4, remote=remote)
    bench.engine.close()
    promotion = bench.engine.promote(keys(1), pin_s=1)
    assert promotion.wait(0)
    assert promotion.counts.missing == 1
    assert remote.questions == []


def test_closing_ends_what_hangs_in_the_remote(
    make_bench: MakeBench, remote: ScriptedRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the tier makes its calls fail; until then they may write into the pool."""
    monkeypatch.setattr("cacheengine.engine.tier_io._LEAST_END_S", 20.0)
    bench = make_bench(4, remote=remote)
    remote.gets.clear()
    _put_by_others(remote, 1)
    read = bench.engine.promote(keys(1), pin_s=1)
    wait_until(lambda: remote.get_count == 1)
    remote.finds.clear()
    asked = bench.engine.promote(keys(2), pin_s=1)
    wait_until(lambda: len(remote.questions) == 2)
    bench.engine.close(drain_s=0.1)
    assert read.done
    assert asked.done
    with pytest.raises(ValueError, match="released"):
        bench.pool.view(0)


def test_the_remote_tier_is_reported(make_bench: MakeBench, remote: ScriptedRemote) -> None:
    info = make_bench(4, remote=remote).engine.tier_info()
    assert set(info) == {"cpu", "remote"}
    assert (info["remote"].capacity_bytes, info["remote"].used_bytes) == (0, 0)


def test_what_is_found_while_its_put_is_queued_is_not_put(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    """Asked for, stored by ourselves, then the answer comes: others have it."""
    bench = make_bench(4, remote=remote)
    remote.finds.clear()
    remote.puts.clear()
    assert bench.engine.lookup(key(3)) is Presence.UNKNOWN
    wait_until(lambda: len(remote.questions) == 1)
    bench.store(keys(1, 2, 3))  # two writers: the put of 3 waits
    wait_until(lambda: len(remote.put_batches) == 2)
    _put_by_others(remote, 3)
    remote.finds.set()
    wait_until(lambda: bench.engine.held_in(keys(3), "remote") == 1)
    remote.puts.set()
    bench.finish_puts()
    assert remote.put_batches == [1, 1]
    assert bench.engine.stats().remote.put_drops == 0


def test_chunks_used_in_ram_are_asked_for_again_and_put_again_if_they_are_gone(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    """The server evicts what nobody asks it for: what replicas serve from RAM, the hottest."""
    bench = make_bench(4, remote=remote)
    bench.store(keys(1, 2))
    bench.finish_puts()
    bench.engine.take_events()
    remote.questions.clear()
    remote.chunks.clear()
    bench.engine.touch(keys(1, 2, 3))
    bench.clock.advance(500)
    bench.engine.touch(keys(1, 2))
    assert remote.questions == []
    bench.clock.advance(200)
    bench.engine.touch(keys(1, 2))
    wait_until(lambda: remote.chunks == {chunk: payload(chunk) for chunk in keys(1, 2)})
    bench.finish_puts()
    assert remote.questions == [keys(1, 2)]
    told = [(event.tier, event.stored) for event in bench.engine.take_events()]
    assert told == [("remote", False), *[("remote", True)] * (len(told) - 1)]
    for _ in range(3):  # they are there now
        bench.clock.advance(700)
        bench.engine.touch(keys(1, 2))
    wait_until(lambda: len(remote.questions) > 1)
    assert {*remote.questions[-1]} <= {*keys(1, 2)}
    assert bench.engine.stats().remote.puts == 4


def test_a_server_that_does_not_answer_loses_no_chunk_by_that(
    make_bench: MakeBench, remote: ScriptedRemote
) -> None:
    bench = make_bench(4, remote=remote)
    bench.store(keys(1))
    bench.finish_puts()
    bench.engine.touch(keys(1))
    remote.answers = False
    bench.clock.advance(2000)
    bench.engine.touch(keys(1))
    wait_until(lambda: bench.engine.stats().remote.unanswered == 1)
    assert bench.engine.held_in(keys(1), "remote") == 1
    assert bench.engine.stats().remote.puts == 1
