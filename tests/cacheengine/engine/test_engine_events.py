"""Events of the engine: replaying events gives the snapshot."""

from cacheengine.engine.engine import CacheEngine
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import keys
from tests.cacheengine.scripted_tier import ScriptedTier
from warmroute_common.agent_protocol import EventBatch, unpack_keys
from warmroute_common.keys import key64


def _replay(batch: EventBatch) -> dict[str, set[int]]:
    tiers: dict[str, set[int]] = {"cpu": set(), "disk": set()}
    for event in batch.events:
        for chunk in unpack_keys(event.keys):
            if event.stored:
                assert chunk not in tiers[event.tier], "stored twice"
                tiers[event.tier].add(chunk)
            else:
                assert chunk in tiers[event.tier], "removed without having been there"
                tiers[event.tier].remove(chunk)
    return tiers


def _snapshot(engine: CacheEngine) -> dict[str, set[int]]:
    return {tier: set(unpack_keys(packed)) for tier, packed in engine.snapshot().tiers.items()}


def test_events_and_snapshot_agree(make_bench: MakeBench) -> None:
    bench = make_bench(4, tier=ScriptedTier(items=6))
    for number in range(12):
        bench.store(keys(number, number + 100))
        bench.finish_puts()
    bench.engine.clear(["cpu"])
    bench.promote(keys(11, 111, 10))
    batch = bench.engine.events_after(0)
    assert batch is not None
    assert batch.incarnation == bench.engine.incarnation == bench.engine.snapshot().incarnation
    assert batch.seq == bench.engine.last_seq == bench.engine.snapshot().seq
    assert _replay(batch) == _snapshot(bench.engine)
    assert _replay(batch)["cpu"] == {key64(chunk) for chunk in keys(11, 111, 10)}


def test_after_a_snapshot_only_news_follow(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1))
    seq = bench.engine.snapshot().seq
    bench.store(keys(2))
    batch = bench.engine.events_after(seq)
    assert batch is not None
    assert [unpack_keys(event.keys) for event in batch.events] == [
        [key64(chunk) for chunk in keys(2)]
    ]
    empty = bench.engine.events_after(batch.seq)
    assert empty is not None
    assert (empty.seq, empty.events) == (batch.seq, [])


def test_a_number_that_never_was_is_unknown(make_bench: MakeBench) -> None:
    assert make_bench(2).engine.events_after(5) is None


def test_listeners_are_called_after_the_news_can_be_read(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    heard: list[int] = []
    forget = bench.engine.add_event_listener(lambda: heard.append(bench.engine.last_seq))
    bench.store(keys(1))
    bench.engine.touch(keys(1))  # no news
    assert heard == [1]
    forget()
    forget()
    bench.store(keys(2))
    assert heard == [1]


def test_vllms_stream_gets_whole_digests_once(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.store(keys(1, 2))
    events = bench.engine.take_events()
    assert [(e.tier, e.stored, e.keys) for e in events] == [("cpu", True, tuple(keys(1, 2)))]
    assert bench.engine.take_events() == []
