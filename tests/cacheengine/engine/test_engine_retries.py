"""What could not be written to a lower tier at once is written later."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.residency.decisions import Presence
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, keys, payload, wait_until
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier


@pytest.fixture
def tier() -> Iterator[ScriptedTier]:
    scripted = ScriptedTier()
    yield scripted
    scripted.close()


def _holds(tier: ScriptedTier, *numbers: int) -> bool:
    return tier.chunks == {chunk: payload(chunk) for chunk in keys(*numbers)}


def _let_time_pass(bench: Bench, seconds: float) -> None:
    """What the agent does every second or so."""
    bench.clock.advance(seconds)
    bench.engine.expire_pins()


def test_what_the_queue_could_not_take_is_put_when_it_can(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = make_bench(4, config(share=0.5), tier=tier)
    tier.puts.clear()
    bench.store(keys(1, 2, 3, 4))
    assert bench.engine.stats().disk.put_drops == 2
    tier.puts.set()
    wait_until(lambda: _holds(tier, 1, 2, 3, 4))
    bench.finish_puts()
    assert bench.engine.stats().disk.put_retries == 2


def test_without_local_cpu_no_chunk_is_lost_for_a_full_queue(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    """It stays in the pool, which has room, until it is on disk; then it leaves."""
    bench = make_bench(8, config(Path("unused"), local_cpu=False, share=0.25), tier=tier)
    tier.puts.clear()
    bench.store(keys(1, 2, 3, 4, 5, 6))
    assert bench.engine.stats().disk.put_drops == 4
    _all_reach_the_disk(bench, tier)


def _all_reach_the_disk(bench: Bench, tier: ScriptedTier) -> None:
    assert bench.has_right_bytes(keys(6))
    tier.puts.set()
    wait_until(lambda: _holds(tier, 1, 2, 3, 4, 5, 6))
    bench.finish_puts()
    assert bench.engine.stats().cpu_used_bytes == 0


def test_without_local_cpu_a_disk_that_hangs_loses_no_chunk(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    """What was queued for it stays in the pool until the disk answers."""
    bench = make_bench(8, config(Path("unused"), local_cpu=False), tier=tier)
    tier.puts.clear()
    bench.store(keys(1, 2, 3, 4, 5, 6))
    wait_until(lambda: len(tier.put_batches) == 2)
    _let_time_pass(bench, 11)
    assert bench.engine.stats().disk.put_drops == 4
    _all_reach_the_disk(bench, tier)


def test_without_local_cpu_a_chunk_leaves_when_its_put_is_given_up(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = make_bench(4, config(Path("unused"), local_cpu=False), tier=tier)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(keys(1))
    bench.finish_puts()
    assert bench.has_right_bytes(keys(1))
    for _ in range(3):
        _let_time_pass(bench, 120)
        bench.finish_puts()
    assert bench.engine.stats().disk.io_errors == 3
    assert bench.engine.stats().cpu_used_bytes == 0


def test_a_put_that_failed_is_tried_again_after_the_pause(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = make_bench(4, tier=tier)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(keys(1))
    bench.finish_puts()
    tier.put_outcome = PutOutcome.STORED
    bench.engine.expire_pins()
    assert bench.engine.stats().put_queue_bytes == 0  # the pause is not over
    _let_time_pass(bench, 2)
    bench.finish_puts()
    assert _holds(tier, 1)


def test_a_put_that_never_succeeds_is_given_up(make_bench: MakeBench, tier: ScriptedTier) -> None:
    bench = make_bench(4, tier=tier)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(keys(1))
    for _ in range(10):
        bench.finish_puts()
        _let_time_pass(bench, 120)
    assert bench.engine.stats().disk.io_errors == 3


def test_what_left_the_pool_or_was_cleared_is_not_put_again(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = make_bench(2, tier=tier)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(keys(1))
    bench.finish_puts()
    bench.store(keys(2))
    bench.engine.clear(keys=keys(1))
    bench.engine.clear(["disk"], keys=keys(2))
    tier.put_outcome = PutOutcome.STORED
    _let_time_pass(bench, 2)
    bench.finish_puts()
    assert tier.chunks == {}


def test_what_came_from_remote_reaches_the_disk(make_bench: MakeBench, tier: ScriptedTier) -> None:
    remote = ScriptedRemote({chunk: payload(chunk) for chunk in keys(1, 2)})
    bench = make_bench(4, tier=tier, remote=remote)
    assert bench.promote(keys(1, 2)) == (0, 2, 0)
    bench.finish_puts()
    assert _holds(tier, 1, 2)
    assert bench.engine.stats().remote.puts == 0
    bench.engine.clear(["cpu"])
    assert bench.engine.match(keys(1, 2)) == ["disk", "disk"]


def _unreadable(make_bench: MakeBench, tier: ScriptedTier, *settings: EngineConfig) -> Bench:
    """A chunk on disk whose read has failed."""
    tier.held_at_start = keys(1)
    tier.chunks = {key(1): b"\xff" * len(payload(key(1)))}
    tier.get_outcome = GetOutcome.FAILED
    bench = make_bench(4, *settings, tier=tier)
    assert bench.promote(keys(1)) == (0, 0, 1)
    return bench


@pytest.mark.parametrize("local_cpu", [True, False])
def test_a_file_that_cannot_be_read_is_written_anew(
    make_bench: MakeBench, tier: ScriptedTier, tmp_path: Path, local_cpu: bool
) -> None:
    bench = _unreadable(make_bench, tier, config(tmp_path, local_cpu=local_cpu))
    bench.store(keys(1))
    bench.finish_puts()
    assert _holds(tier, 1)
    tier.get_outcome = GetOutcome.OK
    bench.engine.clear(["cpu"])
    assert bench.promote(keys(1)) == (0, 1, 0)
    assert bench.has_right_bytes(keys(1))


def test_what_could_not_be_written_anew_is_still_there(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _unreadable(make_bench, tier)
    tier.put_outcome = PutOutcome.FAILED
    bench.store(keys(1))
    bench.finish_puts()
    assert _on_disk(bench.engine) == 1
    assert _told(bench.engine)[-1] == ("disk", True)


def test_it_is_not_found_while_it_is_written_anew(
    make_bench: MakeBench, tier: ScriptedTier
) -> None:
    bench = _unreadable(make_bench, tier)
    tier.puts.clear()
    bench.store(keys(1))
    wait_until(lambda: tier.put_batches != [])
    assert _on_disk(bench.engine) == 0
    assert _told(bench.engine)[-1] == ("disk", False)
    bench.engine.clear(["disk"])
    tier.puts.set()
    bench.finish_puts()
    wait_until(lambda: tier.chunks == {})


def _on_disk(engine: CacheEngine) -> int:
    return engine.held_in(keys(1), "disk")


def _told(engine: CacheEngine) -> list[tuple[str, bool]]:
    return [(event.tier, event.stored) for event in engine.take_events()]


def _count_questions(remote: ScriptedRemote, count: int) -> bool:
    wait_until(lambda: len(remote.questions) >= count)
    return len(remote.questions) == count


def test_a_server_that_is_well_again_is_asked_within_a_second(make_bench: MakeBench) -> None:
    """Its store has a breaker of its own; a second one that grew would hide it for a minute."""
    remote = ScriptedRemote({key(1): payload(key(1))})
    bench = make_bench(4, remote=remote)
    remote.answers = False
    for number in range(1, 9):
        assert bench.promote(keys(1)) == (0, 0, 1)
        assert bench.engine.lookup(key(1)) is Presence.MISS  # no request waits for it
        bench.clock.advance(1.1)
        bench.engine.expire_pins()
        assert _count_questions(remote, number + 1)
    remote.answers = True
    bench.clock.advance(1.1)
    bench.engine.expire_pins()
    wait_until(lambda: bench.engine.lookup(key(1)) is not Presence.MISS)
    assert bench.promote(keys(1)) == (0, 1, 0)


def test_puts_that_were_never_tried_are_not_given_up(make_bench: MakeBench) -> None:
    remote = ScriptedRemote()
    bench = make_bench(4, remote=remote)
    remote.put_outcome = PutOutcome.NOT_TRIED
    bench.store(keys(1))
    for _ in range(20):
        bench.finish_puts()
        _let_time_pass(bench, 1.1)
    assert bench.engine.stats().remote.io_errors == 0
    bench.finish_puts()
    remote.put_outcome = PutOutcome.STORED
    _let_time_pass(bench, 1.1)
    bench.finish_puts()
    assert set(remote.chunks) == set(keys(1))
