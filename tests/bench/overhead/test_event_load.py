"""The bench of following a large fleet's KV events."""

from bench.overhead.event_load import Publishers, make_fleet, measure, messages
from router.index.kv_events import KvEventReader
from router.index.prompt_keys import KvTier


def test_what_a_publisher_repeats_keeps_its_replica_as_full_as_it_is() -> None:
    fleet, reader = make_fleet(["tcp://127.0.0.1:1"]), KvEventReader()
    held = fleet.index.held(0)[KvTier.GPU]
    for seq, payload in enumerate(messages(0) * 2):
        fleet.apply_kv("r0", reader.read(seq, payload), 0.0)
    assert fleet.messages == 128
    assert fleet.index.held(0)[KvTier.GPU] == held + 48 * 3
    fleet.index.check()


def test_it_follows_publishers_of_another_process() -> None:
    with Publishers(3, 50) as endpoints:
        for name in ("bare", "receiving", "index"):
            phase = measure(name, endpoints, 50, 1, 1)
            assert phase.messages > 0
            assert phase.losses == 0
            assert phase.loop_us_per_message > 0
