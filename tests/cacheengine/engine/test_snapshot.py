"""A snapshot is listed in parts; with the events after its number it says what is there."""

from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import InterruptedLock, keys
from tests.cacheengine.scripted_tier import ScriptedTier
from warmroute_common.agent_protocol import unpack_keys
from warmroute_common.keys import key64

MANY = 3000


def test_what_changes_while_a_snapshot_is_listed_is_told_by_the_events_after_it(
    make_bench: MakeBench,
) -> None:
    tier = ScriptedTier(items=MANY, held=keys(*range(MANY)))
    bench = make_bench(MANY, tier=tier)
    bench.store(keys(*range(0, MANY, 2)))
    bench.finish_puts()
    parts = [0]

    def change() -> None:
        parts[0] += 1
        bench.engine.clear(keys=keys(parts[0], parts[0] + 1, MANY - parts[0]))
        bench.store(keys(parts[0] + 1, MANY + parts[0]))
        lock.left, lock.meanwhile = 1, change

    before = bench.engine.last_seq
    # The first loan is for the number of the last event.
    lock = InterruptedLock(bench.engine, 2, change)
    snapshot = bench.engine.snapshot()
    lock.meanwhile = None
    assert parts[0] > 4
    assert snapshot.seq == before
    tiers = {tier: set(unpack_keys(packed)) for tier, packed in snapshot.tiers.items()}
    bench.finish_puts()
    batch = bench.engine.events_after(snapshot.seq)
    assert batch is not None
    for event in batch.events:
        change = tiers[event.tier].update if event.stored else tiers[event.tier].difference_update
        change(unpack_keys(event.keys))
    state = bench.engine._decider.state
    assert tiers["cpu"] == {key64(each) for each in state.pool.ready_keys()}
    assert tiers["disk"] == set(map(key64, state.lower[0].keys()))
