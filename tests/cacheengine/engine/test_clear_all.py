"""All is cleared in one step; slots, files and what uses them follow, a portion at a time."""

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.tier_io import TierIo
from cacheengine.memory import Pool
from cacheengine.residency.decisions import PORTION, Presence
from cacheengine.residency.eviction_policies import POLICY_NAMES
from cacheengine.tiers.tier import PutOutcome
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import (
    CHUNK_BYTES,
    FakeClock,
    ManualThreads,
    config,
    key,
    keys,
    layout,
    payload,
    tier_stack,
    wait_until,
)
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier

MANY = 4 * PORTION
PREFIX = keys(*range(MANY))


def _run(io: TierIo, most: int = 10_000) -> None:
    """Run the jobs of a tier's threads."""
    for threads in (io._readers, io._writers, io._asker):
        assert threads is None or isinstance(threads, ManualThreads)
        while threads and threads.jobs and most:
            threads.jobs.pop(0)()
            most -= 1


class Still:
    """An engine whose I/O threads do nothing by themselves."""

    def __init__(
        self, tier: ScriptedTier, *, policy: str = "LRU", remote: ScriptedRemote | None = None
    ) -> None:
        settings = config()
        settings = type(settings)(cache_policy=policy, put_queue_share=1.0)
        self.pool = Pool.allocate(MANY, CHUNK_BYTES)
        self.engine = CacheEngine(
            settings,
            layout(),
            self.pool,
            clock=FakeClock(),
            tier=tier,
            remote=remote,
            make_threads=ManualThreads,
        )

    def store(self, chunks: list[bytes]) -> int:
        reservation = self.engine.prepare_store(chunks)
        if reservation is None:
            return 0
        for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.pool.view(slot)[:] = payload(chunk)
        self.engine.complete_store(reservation.keys)
        return len(reservation.keys)

    def run_io(self) -> None:
        for io in tier_stack(self.engine).io:
            _run(io)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_slots_come_back_by_themselves_or_when_they_are_wanted(policy: str) -> None:
    still = Still(ScriptedTier(items=0), policy=policy)
    still.store(PREFIX)
    still.engine.touch(PREFIX[:5])
    still.engine.pin(PREFIX[:9], "cpu")
    still.engine.promote(PREFIX[5:20], pin_s=10.0)
    assert still.engine.clear() == {"cpu": MANY, "disk": 0}
    assert still.engine.match(PREFIX[:1]) == []
    assert still.engine.stats().cpu_used_bytes > 0
    still.engine.check()
    assert still.store(keys(*range(1000, 1000 + MANY - 1))) == MANY - 1
    still.engine.check()
    still.run_io()
    assert still.engine.stats().cpu_used_bytes == (MANY - 1) * CHUNK_BYTES
    assert still.engine.pin(keys(*range(1000, 1000 + MANY)), "cpu") == MANY // 2
    still.engine.check()


def test_what_is_in_use_keeps_its_slot_until_its_use_ends() -> None:
    still = Still(ScriptedTier(items=0))
    still.store(PREFIX)
    slots = still.engine.hold(PREFIX[-2:])
    reserved = still.engine.clear(["cpu"], PREFIX[:1]) and still.engine.prepare_store(keys(500))
    assert reserved is not None
    assert reserved
    still.engine.clear()
    assert still.engine.lookup(PREFIX[-1]) is Presence.MISS
    assert still.engine.hold(PREFIX[-1:], held_before=True) == slots[1:]
    assert still.store(PREFIX[-2:]) == 0  # their keys are taken until then
    assert still.store(keys(*range(1000, 1000 + MANY))) == MANY - 3
    assert [bytes(still.pool.view(slot)) for slot in slots] == [*map(payload, PREFIX[-2:])]
    still.engine.complete_store(reserved.keys)
    assert still.engine.lookup(key(500)) is Presence.MISS
    still.engine.release(PREFIX[-2:])
    still.engine.release(PREFIX[-1:])
    assert still.engine.stats().cpu_used_bytes == (MANY - 3) * CHUNK_BYTES
    still.engine.check()


def test_promotions_that_wait_for_cleared_chunks_end() -> None:
    tier = ScriptedTier(items=2 * MANY, held=PREFIX)
    tier.chunks = {chunk: payload(chunk) for chunk in PREFIX}
    still = Still(tier)
    promotion = still.engine.promote(PREFIX[:60], pin_s=10.0)
    still.engine.clear(["cpu"])
    still.engine.check()
    still.run_io()
    assert promotion.counts.missing == 60
    assert still.engine.stats().cpu_used_bytes == 0
    assert still.engine.held_in(PREFIX, "disk") == MANY
    still.engine.check()


def test_puts_of_a_cleared_pool_end_and_puts_to_a_cleared_disk_are_dropped() -> None:
    tier = ScriptedTier(items=2 * MANY)
    still = Still(tier)
    still.store(PREFIX)
    still.engine.clear(["cpu"])
    still.engine.check()
    still.run_io()
    queued = PREFIX[: 3 * PORTION]  # three quarters of the queue are for first uses
    assert list(tier.chunks) == queued
    still.store(keys(*range(1000, 1000 + MANY)))
    assert still.engine.clear(["disk"]) == {"disk": len(queued)}
    assert still.engine.held_in(PREFIX[:1], "disk") == 0
    still.engine.check()
    still.run_io()
    assert tier.chunks == {}
    assert still.engine.tier_info()["disk"].used_bytes == 0
    assert still.engine.stats().disk.put_drops == 2 * MANY - len(queued)
    still.engine.check()


def test_a_tier_that_was_cleared_keeps_its_capacity_while_it_deletes() -> None:
    tier = ScriptedTier(items=MANY)
    still = Still(tier)
    still.store(PREFIX)
    still.run_io()
    still.engine.clear(["disk"])
    assert still.engine.tier_info()["disk"].used_bytes == MANY * tier.item_bytes
    assert still.engine.clear(["disk"]) == {"disk": 0}
    still.engine.check()
    still.run_io()
    assert still.engine.tier_info()["disk"].used_bytes == 0


def test_a_shared_tier_is_cleared_or_forgotten_whole() -> None:
    remote = ScriptedRemote()
    still = Still(ScriptedTier(items=0), remote=remote)
    still.store(PREFIX)
    still.run_io()
    assert set(remote.chunks) == set(PREFIX)
    assert still.engine.clear(["remote"], keep_shared=True) == {"remote": MANY}
    assert set(remote.chunks) == set(PREFIX)
    still.run_io()
    still.engine.clear(["cpu"])
    still.engine.check()
    for chunk in PREFIX:
        still.engine.lookup(chunk)
    still.run_io()
    assert still.engine.held_in(PREFIX, "remote") == MANY
    assert still.engine.clear(["remote"])["remote"] == MANY
    assert still.engine.lookup(PREFIX[0]) is Presence.MISS  # on its way out: not asked for
    still.engine.check()
    still.run_io()
    assert remote.chunks == {}
    still.engine.check()


def test_a_write_that_ends_after_a_clear_is_deleted() -> None:
    tier = ScriptedTier(items=2 * MANY)
    tier.put_outcome = PutOutcome.STORED
    still = Still(tier)
    still.store(PREFIX)
    still.run_io()
    # A put under way: its room is reserved, then all is cleared.
    still.store(keys(*range(1000, 1000 + 1)))
    decider = still.engine._decider
    entries, _ = decider.cascades["disk"].begin(1, 1000.0)
    still.engine.clear(["disk"])
    decider.cascades["disk"].end(entries, [PutOutcome.STORED], 1000.0)
    still.engine.check()
    still.run_io()
    assert still.engine.tier_info()["disk"].used_bytes == 0
    still.engine.check()


def test_followers_are_told_of_every_chunk_once_and_in_order(make_bench: MakeBench) -> None:
    many = 3000
    bench = make_bench(many, tier=ScriptedTier(items=many))
    bench.store(keys(*range(many)))
    bench.finish_puts()
    bench.engine.take_events()
    bench.engine.clear()
    bench.store(keys(1, 2))
    wait_until(lambda: bench.engine.stats().cpu_used_bytes == 2 * CHUNK_BYTES)
    events = bench.engine.take_events()
    for tier in ("cpu", "disk"):
        removed = [chunk for e in events if e.tier == tier and not e.stored for chunk in e.keys]
        assert len(removed) == many
        assert set(removed) == set(keys(*range(many)))
    stored = [number for number, e in enumerate(events) if e.tier == "cpu" and e.stored]
    assert max(n for n, e in enumerate(events) if e.tier == "cpu" and not e.stored) < stored[0]
