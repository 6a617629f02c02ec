"""Events of the tiers below the GPU: vLLM's own form, and what a router makes of it."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cacheengine.record import KeyEventRecord
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.fleet import Fleet
from router.index.kv_events import BlocksRemoved, BlocksStored, KvEventReader
from router.index.prompt_keys import KvTier
from simulator.engine_tiers import ObservedTiers
from simulator.kv_event_publisher import TierEvents, encode_events
from simulator.openai_prompts import Prompts
from tests.simulator.helpers import CHUNK, Bench, model, request, run
from warmroute_common.keys import HashScheme, key64

BLOCK, PER_CHUNK = 16, 4
PROMPT = Prompts(HashScheme(), BLOCK, PER_CHUNK).of_ids(range(200), 20)
KEYS = [key64(key) for key in PROMPT.block_keys]
CHUNKS = PROMPT.chunk_keys


def tier_events(most: int = 100) -> TierEvents:
    return TierEvents(block_tokens=BLOCK, blocks_per_chunk=PER_CHUNK, most=most)


def stored(tier: str, *chunks: int) -> KeyEventRecord:
    return KeyEventRecord(tier, True, tuple(CHUNKS[each] for each in chunks))


def removed(tier: str, *chunks: int) -> KeyEventRecord:
    return KeyEventRecord(tier, False, tuple(CHUNKS[each] for each in chunks))


LIFE = (
    [stored("cpu", 0, 1), stored("disk", 0, 1)],
    [removed("cpu", 0), stored("disk", 0)],
    [stored("cpu", 0), removed("disk", 0, 1)],
    [removed("cpu", 1)],
)
"""Chunks in CPU RAM and on disk; one that leaves RAM, and comes back unnoticed; the end."""


def told(events: TierEvents) -> list[list[dict[str, Any]]]:
    events.learn(PROMPT, range(2))
    return [events.vllm_events(batch) for batch in LIFE]


@pytest.mark.vllm
def test_they_are_what_vllms_connector_makes_of_the_same() -> None:
    tracking = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.events")
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    tracker = tracking.OffloadingEventsTracker(base.OffloadingKVEventsConfig(True, True))
    asked = SimpleNamespace(
        block_hashes=list(PROMPT.block_keys),
        all_token_ids=PROMPT.tokens(0, 220),
        lora_request=None,
    )
    group = SimpleNamespace(
        group_idx=0,
        tokens_per_block=BLOCK,
        tokens_per_chunk=BLOCK * PER_CHUNK,
        hashes_per_chunk=PER_CHUNK,
        sliding_window_size_in_chunks=None,
        kv_event_group_spec=tracking.OffloadingEventGroupSpec("full_attention", None),
    )
    for chunk in range(2):
        key = base.make_offload_key(CHUNKS[chunk], 0)
        tracker.record_store(asked, group, chunk, key)

    def theirs(records: Iterable[KeyEventRecord]) -> Any:
        """As `cacheengine.connector.manager` gives them to vLLM."""
        medium = {"cpu": base.Medium.CPU, "disk": base.Medium.STORAGE}
        events = [
            base.OffloadingEvent(
                keys=[base.make_offload_key(key, 0) for key in each.keys],
                medium=medium[each.tier],
                removed=not each.stored,
                locality=base.Locality.LOCAL,
            )
            for each in records
        ]
        return msgspec.msgpack.decode(msgspec.msgpack.encode([*tracker.take_events(events)]))

    ours = [msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) for batch in told(tier_events())]
    assert ours == [theirs(batch) for batch in LIFE]


def test_a_chunk_in_ram_is_told_as_its_blocks_with_their_tokens() -> None:
    (first, second, on_disk, _), *_ = told(tier_events())
    assert (first["medium"], on_disk["medium"]) == ("CPU", "STORAGE")
    assert (first["parent_block_hash"], second["parent_block_hash"]) == (None, KEYS[3])
    assert second["block_hashes"] == tuple(KEYS[4:8])
    assert second["token_ids"] == list(range(64, 128))


def test_of_a_chunk_that_left_ram_only_its_key_is_known() -> None:
    *_, (back, gone), _ = told(tier_events())
    assert (back["block_hashes"], back["token_ids"]) == ((KEYS[3],), ())
    assert gone["block_hashes"] == [KEYS[3], *KEYS[4:8]]


def test_it_remembers_no_more_than_it_may() -> None:
    events = tier_events(most=1)
    events.learn(PROMPT, range(2))
    first, second = events.vllm_events([stored("cpu", 0, 1)])
    assert (len(first["block_hashes"]), len(second["block_hashes"])) == (1, 4)


def test_the_router_reads_them_and_leaves_them_to_the_agent_where_there_is_one() -> None:
    events = tier_events()
    events.learn(PROMPT, range(2))
    lower = events.vllm_events([stored("cpu", 0, 1), stored("disk", 0), removed("cpu", 1)])
    batch = KvEventReader().read(0, encode_events([], lambda _: PROMPT, BLOCK, 0.0, lower))
    assert [each for each in batch.events if isinstance(each, BlocksStored | BlocksRemoved)] == [
        BlocksStored(KvTier.CPU, KEYS[:4]),
        BlocksStored(KvTier.CPU, KEYS[4:8]),
        BlocksStored(KvTier.DISK, KEYS[:4]),
        BlocksRemoved(KvTier.CPU, KEYS[4:8]),
    ]
    for agent_url, held in (
        ("http://127.0.0.1:2", {}),
        (None, {KvTier.CPU: 4, KvTier.DISK: 4}),
    ):
        replica = ReplicaConfig(url="http://127.0.0.1:1", instance_id="r", agent_url=agent_url)
        fleet = Fleet(RouterConfig(replicas=(replica,)))
        fleet.apply_kv("r", batch, 0.0)
        assert {tier: count for tier, count in fleet.index.held(0).items() if count} == held


def test_tiers_tell_what_they_reserve_and_what_they_find() -> None:
    noted: list[tuple[str, list[int]]] = []
    engine = Bench(cpu_chunks=8, disk_chunks=8).engine
    tiers = ObservedTiers(
        engine,
        chunk_tokens=CHUNK,
        clock=lambda: 0.0,
        prefill_tokens_per_s=1.0,
        noted=lambda asked, chunks: noted.append((asked.id, list(chunks))),
    )
    sim = model(tiers, gpu_tokens=200)
    sim.arrive(request("a", 60, text="t"), 0.0)
    run(sim)
    assert sim.clear_gpu()
    sim.arrive(request("b", 70, text="t"), 100.0)
    run(sim)
    engine.close(drain_s=1.0)
    assert noted == [("a", [0, 1, 2]), ("b", [0, 1, 2])]
