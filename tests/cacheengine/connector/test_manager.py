"""The scheduler's face on a real engine: what vLLM's scheduler would do, call by call."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

from tests.cacheengine.conftest import MakeBench  # noqa: E402
from tests.cacheengine.helpers import Bench, config, key, payload, wait_until  # noqa: E402
from tests.cacheengine.scripted_tier import ScriptedRemote, ScriptedTier  # noqa: E402

GROUP = 0


def offload_keys(*numbers: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(key(number), GROUP) for number in numbers]


class Scheduler:
    """One request's calls to the manager, in vLLM's order."""

    def __init__(self, bench: Bench) -> None:
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        from cacheengine.connector.manager import WarmrouteManager

        self.bench = bench
        self.closed = 0
        self.context = ReqContext("request-1")
        self._end = ScheduleEndContext(new_req_ids=[], preempted_req_ids=[])
        self.manager = WarmrouteManager(
            bench.engine, GROUP, enable_events=True, on_shutdown=self._closing, clock=bench.clock
        )

    def _closing(self) -> None:
        self.closed += 1

    def next_request(self) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        self.manager.on_request_finished(self.context)
        self.context = ReqContext(self.context.req_id + "+")

    def lookup(self, *numbers: int) -> list[str]:
        return [self.manager.lookup(k, self.context).name for k in offload_keys(*numbers)]

    def must_wait(self) -> bool:
        compute_s = float("inf")  # no rate is known
        return self.manager.waits.must_wait(self.context.req_id, 0, compute_s, compute_s)

    def end_step(self) -> None:
        self.manager.on_schedule_end(self._end)

    def store(self, *numbers: int, complete: bool = True) -> list[int]:
        output = self.manager.prepare_store(offload_keys(*numbers), self.context)
        assert output is not None
        slots: list[int] = output.store_spec.block_ids.tolist()
        for number, slot in zip(numbers, slots, strict=True):
            self.bench.pool.view(slot)[:] = payload(key(number))
        if complete:
            self.manager.complete_store(output.keys_to_store, self.context)
        return slots


@pytest.fixture
def scheduler(tmp_path: Path, make_bench: MakeBench) -> Scheduler:
    return Scheduler(make_bench(4, config(tmp_path)))


def test_a_stored_chunk_is_hit_and_loaded_from_its_slot(scheduler: Scheduler) -> None:
    slots = scheduler.store(1, 2, complete=False)
    assert scheduler.lookup(1, 2, 3) == ["HIT_PENDING", "HIT_PENDING", "MISS"]
    scheduler.manager.complete_store(offload_keys(1, 2), scheduler.context)
    assert scheduler.lookup(1, 2) == ["HIT", "HIT"]
    spec = scheduler.manager.prepare_load(offload_keys(1, 2), scheduler.context)
    assert spec.block_ids.tolist() == slots
    scheduler.end_step()
    scheduler.manager.complete_load(offload_keys(1, 2), scheduler.context)


def test_a_hit_stays_until_the_step_ends(scheduler: Scheduler) -> None:
    """Between lookup and prepare_load nothing may evict the chunk."""
    scheduler.store(1, 2, 3, 4)
    scheduler.bench.finish_puts()
    assert scheduler.lookup(1, 2, 3, 4) == ["HIT"] * 4
    assert _offer(scheduler, 5) == []
    scheduler.end_step()
    scheduler.manager.stores.refused.clear()
    assert _offer(scheduler, 5) == [5]


def test_a_chunk_on_disk_is_promoted_while_the_request_waits(scheduler: Scheduler) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    scheduler.store(1, 2)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"])
    assert set(scheduler.lookup(1, 2)) <= {"RETRY"}
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 2)
    assert scheduler.lookup(1, 2) == ["HIT", "HIT"]
    source = scheduler.manager.get_load_source(offload_keys(1)[0], scheduler.context)
    assert source is CacheHitSource.DISK
    scheduler.manager.prepare_load(offload_keys(1, 2), scheduler.context)
    scheduler.end_step()
    assert scheduler.bench.has_right_bytes([key(1), key(2)])
    scheduler.manager.complete_load(offload_keys(1, 2), scheduler.context)


def filtered(**matcher: str) -> dict[str, Any]:
    """Return what a request says to load from some tiers alone."""
    return {"kv_load_tiers": [matcher]}


def context_of(params: dict[str, Any] | None) -> Any:
    """Return the context that vLLM's scheduler makes of a request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        _create_req_context,
    )

    request = SimpleNamespace(request_id="filtered", kv_transfer_params=params, kv_hints=None)
    return _create_req_context(request)


@pytest.mark.parametrize(
    ("params", "on_disk"),
    [
        (None, "RETRY"),
        (filtered(medium="STORAGE"), "RETRY"),
        (filtered(locality="LOCAL"), "RETRY"),
        (filtered(medium="CPU"), "MISS"),
        (filtered(locality="REMOTE"), "MISS"),
        ({"kv_load_tiers": []}, "MISS"),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_allows(
    scheduler: Scheduler, params: dict[str, Any] | None, on_disk: str
) -> None:
    scheduler.store(1)
    scheduler.bench.finish_puts()
    scheduler.store(2)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"], keys=[key(1)])
    scheduler.context = context_of(params)
    assert scheduler.lookup(1) == [on_disk]
    assert scheduler.lookup(2) == ["HIT"], "the CPU tier serves every request"
    scheduler.end_step()
    promotes = on_disk == "RETRY"
    if promotes:
        wait_until(lambda: scheduler.bench.engine.stats().promoted == 1)
    assert scheduler.bench.engine.stats().prefetches == promotes
    # What another request has had promoted is in the CPU tier.
    assert scheduler.lookup(1) == (["HIT"] if promotes else ["MISS"])


def _wait_for_room(scheduler: Scheduler) -> None:
    """Have a request wait for a chunk on disk, with all of the pool in use."""
    scheduler.store(1)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"])
    scheduler.store(2, 3, 4, 5)
    scheduler.bench.finish_puts()
    scheduler.manager.prepare_load(offload_keys(2, 3, 4, 5), scheduler.context)
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()


def test_a_chunk_on_disk_waits_for_room(scheduler: Scheduler) -> None:
    _wait_for_room(scheduler)
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    assert scheduler.bench.engine.stats().promote_drops == 1, "no room, no further try"
    scheduler.manager.complete_load(offload_keys(2, 3, 4, 5), scheduler.context)
    assert scheduler.must_wait()
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 1)
    assert not scheduler.must_wait()
    assert scheduler.lookup(1) == ["HIT"]


def test_a_chunk_that_finds_no_room_for_a_minute_is_a_miss(scheduler: Scheduler) -> None:
    _wait_for_room(scheduler)
    scheduler.bench.clock.advance(59.0)
    assert scheduler.must_wait()
    scheduler.bench.clock.advance(1.0)
    assert not scheduler.must_wait()
    assert scheduler.lookup(1) == ["MISS"]


@pytest.mark.parametrize("pending_for_another", [False, True])
def test_a_disk_that_hangs_is_not_waited_for(
    make_bench: MakeBench, pending_for_another: bool
) -> None:
    """Chunks that arrive later are kept for the next request."""
    tier = ScriptedTier(held=[key(1)])
    tier.chunks[key(1)] = payload(key(1))
    scheduler = Scheduler(make_bench(4, tier=tier))
    tier.gets.clear()
    if pending_for_another:
        scheduler.bench.engine.promote([key(1)], pin_s=0.0)
        assert scheduler.lookup(1) == ["HIT_PENDING"]
    else:
        assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    assert scheduler.must_wait()
    wait_until(lambda: tier.get_count == 1)
    scheduler.bench.clock.advance(5.1)
    assert not scheduler.must_wait()
    assert scheduler.lookup(1) == ["MISS"]
    tier.gets.set()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 1)
    scheduler.next_request()
    assert scheduler.lookup(1) == ["HIT"]


def test_a_request_that_is_aborted_leaves_no_pins(scheduler: Scheduler) -> None:
    scheduler.store(1)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"])
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 1)
    assert scheduler.bench.engine.stats().cpu_held_bytes > 0
    scheduler.manager.on_request_finished(scheduler.context)
    assert scheduler.bench.engine.stats().cpu_held_bytes == 0


class Waiting:
    """A prompt of two chunks that are ready, asked for step by step until the GPU has room."""

    def __init__(self, bench: Bench) -> None:
        from cacheengine.connector.connector import UncomputedPrompts, WarmrouteConnector

        self.scheduler = Scheduler(bench)
        self.lookups = 0
        self.connector = WarmrouteConnector.__new__(WarmrouteConnector)
        self.connector._bounding_group_ids = ()
        self.connector._uncomputed = UncomputedPrompts()
        self.connector.connector_scheduler = SimpleNamespace(
            manager=self.scheduler.manager, get_num_new_matched_tokens=self._look_up
        )
        self.request: Any = SimpleNamespace(request_id="request-1", num_tokens=600)
        self.scheduler.store(1, 2)

    def _look_up(self, request: Any, *limits: int, **options: Any) -> tuple[int | None, bool]:
        self.lookups += 1
        hits = self.scheduler.lookup(1, 2).count("HIT")
        return 256 * hits, hits > 0

    def ask(self, computed: int = 0) -> tuple[int | None, bool]:
        """Ask in a step of its own."""
        matched: tuple[int | None, bool]
        matched = self.connector.get_num_new_matched_tokens(self.request, computed)
        self.scheduler.end_step()
        return matched

    def is_held(self) -> bool:
        """Whether no store can take its chunks' slots."""
        reservation = self.scheduler.bench.engine.prepare_store([key(1000 + n) for n in range(8)])
        assert reservation is not None
        self.scheduler.bench.engine.complete_store(reservation.keys, success=False)
        return key(1) not in reservation.evicted


@pytest.fixture
def waiting(make_bench: MakeBench) -> Waiting:
    return Waiting(make_bench(8))


def test_a_prompt_that_waits_for_the_gpu_is_not_looked_up_in_each_step(waiting: Waiting) -> None:
    assert [waiting.ask() for _ in range(17)] == [(512, True)] * 17
    assert waiting.lookups == 1
    assert waiting.is_held()
    assert waiting.ask() == (512, True)
    assert waiting.lookups == 2, "others may have stored more of it"
    waiting.ask(16)
    assert waiting.lookups == 3, "the GPU has some of it now"
    slots = waiting.scheduler.manager.prepare_load(offload_keys(1, 2), waiting.scheduler.context)
    assert len(slots.block_ids) == 2
    waiting.scheduler.end_step()
    waiting.scheduler.manager.complete_load(offload_keys(1, 2), waiting.scheduler.context)
    assert not waiting.is_held()


@pytest.mark.parametrize("end", ["not asked", "aborted", "reset", "weights"])
def test_what_a_waiting_prompt_holds_is_released(waiting: Waiting, end: str) -> None:
    waiting.ask()
    manager = waiting.scheduler.manager
    match end:
        case "aborted":
            manager.on_request_finished(waiting.scheduler.context)
        case "reset":
            manager.reset_cache()
        case "weights":
            manager.weights_changed()
    waiting.scheduler.end_step()
    if end == "not asked":
        assert not waiting.is_held()
    assert waiting.scheduler.bench.engine.stats().cpu_held_bytes == 0
    if end in {"reset", "weights"}:
        assert waiting.ask() == (0, False)


def test_a_prompt_that_takes_much_of_the_pool_is_looked_up_again(make_bench: MakeBench) -> None:
    waiting = Waiting(make_bench(7))
    assert waiting.ask() == waiting.ask() == (512, True)
    assert waiting.lookups == 2


def test_two_loads_of_one_chunk_each_hold_it(scheduler: Scheduler) -> None:
    scheduler.store(1)
    scheduler.bench.finish_puts()
    for _ in range(2):
        scheduler.manager.prepare_load(offload_keys(1), scheduler.context)
    scheduler.manager.complete_load(offload_keys(1), scheduler.context)
    scheduler.store(2, 3, 4)
    scheduler.bench.finish_puts()
    # All slots are taken, and chunk 1 is still being loaded.
    scheduler.store(5)
    assert scheduler.lookup(1) == ["HIT"]
    scheduler.end_step()
    scheduler.manager.complete_load(offload_keys(1), scheduler.context)


def test_a_chunk_cleared_between_lookup_and_load_is_loaded_all_the_same(
    scheduler: Scheduler,
) -> None:
    """The agent clears on a thread of its own; an exception here would end vLLM's core."""
    slots = scheduler.store(1, 2)
    scheduler.bench.finish_puts()
    assert scheduler.lookup(1, 2) == ["HIT", "HIT"]
    scheduler.bench.engine.clear()
    spec = scheduler.manager.prepare_load(offload_keys(1, 2), scheduler.context)
    assert spec.block_ids.tolist() == slots
    scheduler.end_step()
    assert scheduler.lookup(1) == ["MISS"]
    # Both rows are still being read: two of four are free.
    output = scheduler.manager.prepare_store(offload_keys(5, 6, 7), scheduler.context)
    assert output is not None
    assert list(output.keys_to_store) == offload_keys(5, 6)
    scheduler.manager.complete_store(output.keys_to_store, scheduler.context)
    scheduler.manager.complete_load(offload_keys(1, 2), scheduler.context)
    scheduler.bench.engine.check()
    scheduler.store(7, 8)


def test_a_load_counts_as_a_use(scheduler: Scheduler) -> None:
    """vLLM's scheduler never calls touch: its loads are what recency can go by."""
    for number in (1, 2, 3, 4):
        scheduler.store(number)
    scheduler.bench.finish_puts()
    scheduler.next_request()
    scheduler.manager.prepare_load(offload_keys(1), scheduler.context)
    scheduler.manager.complete_load(offload_keys(1), scheduler.context)
    scheduler.store(5)
    assert scheduler.bench.engine.match([key(1)]) == ["cpu"]
    assert scheduler.bench.engine.match([key(2)]) == ["disk"]


def test_offering_a_chunk_that_is_there_counts_as_a_use(scheduler: Scheduler) -> None:
    """A prefix that the GPU holds is never loaded, only offered again by every request."""
    for number in (1, 2, 3, 4):
        scheduler.store(number)
    scheduler.bench.finish_puts()
    scheduler.next_request()
    output = scheduler.manager.prepare_store(offload_keys(1), scheduler.context)
    assert output is not None and not output.keys_to_store
    scheduler.store(5)
    assert scheduler.bench.engine.match([key(1)]) == ["cpu"]
    assert scheduler.bench.engine.match([key(2)]) == ["disk"]


def test_a_stored_prefix_leaves_from_its_end(scheduler: Scheduler) -> None:
    """vLLM names a finished store's chunks in no order, with their positions."""
    chunks = offload_keys(1, 2, 3, 4)
    for position, chunk in enumerate(chunks, 1):
        scheduler.context.set_offload_key_position(chunk, 256 * position)
    scheduler.store(1, 2, 3, 4, complete=False)
    scheduler.manager.complete_store([chunks[i] for i in (2, 0, 3, 1)], scheduler.context)
    scheduler.bench.finish_puts()
    for newcomer, leaves in ((5, 4), (6, 3), (7, 2)):
        output = scheduler.manager.prepare_store(offload_keys(newcomer), scheduler.context)
        assert output is not None
        assert output.evicted_keys == offload_keys(leaves)


@pytest.mark.parametrize(("batches", "steps"), [(1, 3), (2, 3), (3, 4), (9, 10)])
def test_reset_keeps_rows_of_transfers_under_way_until_they_are_flushed(
    scheduler: Scheduler, batches: int, steps: int
) -> None:
    """With pipeline stages vLLM schedules that many batches before the first has ended."""
    scheduler.manager.expect_batches(batches)
    scheduler.store(1, 2)
    scheduler.bench.finish_puts()
    scheduler.manager.prepare_load(offload_keys(1), scheduler.context)
    scheduler.store(3, complete=False)
    scheduler.manager.reset_cache()
    assert scheduler.bench.engine.match([key(1), key(2)]) == ["disk", "disk"], "that stays"

    def can_store_four() -> bool:
        output = scheduler.manager.prepare_store(offload_keys(6, 7, 8, 9), scheduler.context)
        assert output is not None
        scheduler.manager.complete_store(output.keys_to_store, scheduler.context, success=False)
        return len(output.keys_to_store) == 4

    for _ in range(steps):
        assert not can_store_four()  # two rows are still in use
        scheduler.end_step()
    assert can_store_four()


def test_weights_that_change_make_all_that_was_stored_unfindable(scheduler: Scheduler) -> None:
    scheduler.store(1, 2)
    scheduler.bench.finish_puts()
    assert scheduler.lookup(1) == ["HIT"]
    scheduler.end_step()
    under_way = scheduler.manager.prepare_store(offload_keys(3), scheduler.context)
    assert under_way is not None
    scheduler.manager.weights_changed()
    assert scheduler.lookup(1, 2) == ["MISS", "MISS"]
    assert scheduler.bench.engine.match([key(1)]) == []
    # The request began with the old weights: it ends in order, and stores nothing.
    scheduler.manager.complete_store(under_way.keys_to_store, scheduler.context)
    nothing = scheduler.manager.prepare_store(offload_keys(4), scheduler.context)
    assert nothing is not None
    assert nothing.keys_to_store == []
    assert scheduler.bench.engine.match([key(3)]) == []
    # The next request's chunks have other keys, which vLLM does not see.
    scheduler.next_request()
    scheduler.manager.on_new_request(scheduler.context)
    assert scheduler.lookup(1) == ["MISS"]
    scheduler.end_step()
    scheduler.store(1)
    assert scheduler.lookup(1) == ["HIT"]
    assert scheduler.bench.engine.match([key(1)]) == []
    scheduler.end_step()
    scheduler.bench.engine.check()


def test_weights_that_change_leave_the_remote_tier_to_others(
    tmp_path: Path, make_bench: MakeBench
) -> None:
    remote = ScriptedRemote()
    scheduler = Scheduler(make_bench(4, config(tmp_path), remote=remote))
    scheduler.store(1)
    scheduler.bench.finish_puts()
    assert remote.find([key(1)]) == [True]
    scheduler.manager.weights_changed()
    scheduler.bench.finish_puts()
    assert remote.find([key(1)]) == [True], "another replica's weights are what they were"
    assert scheduler.bench.engine.held_in([key(1)], "remote") == 0


@pytest.mark.usefixtures("patient_with_files")
def test_requests_of_an_adapter_have_keys_of_its_files(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    from vllm.v1.kv_offload.base import ReqContext

    from cacheengine.identity.kv_versions import LoraAdapter

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    adapter = LoraAdapter("a", str(tmp_path / "a"), 1)

    def arrive(req_id: str) -> None:
        scheduler.context = ReqContext(req_id)
        scheduler.manager.keys.expect(req_id, adapter)
        scheduler.manager.on_new_request(scheduler.context)

    arrive("with")
    scheduler.store(1)
    assert scheduler.lookup(1) == ["HIT"]
    assert scheduler.bench.engine.match([key(1)]) == [], "not the model's own"
    version = scheduler.manager.keys.versions.of_name(("a", str(tmp_path / "a")))
    assert scheduler.bench.engine.match([version.stored_key(key(1))]) == ["cpu"]
    (tmp_path / "a" / "adapter_config.json").write_text("{ }")
    nothing = scheduler.manager.prepare_store(offload_keys(2), scheduler.context)
    assert nothing is not None
    assert nothing.keys_to_store == [], "vLLM may have read the new files by now"
    arrive("after")
    assert scheduler.lookup(1) == ["MISS"]


def test_a_vllm_that_says_when_it_has_flushed_is_believed(scheduler: Scheduler) -> None:
    scheduler.store(1, 2, 3, 4, complete=False)
    scheduler.manager.reset_cache()
    assert _offer(scheduler, 6) == []
    scheduler.manager.on_reset_flushed()
    scheduler.manager.stores.refused.clear()
    assert _offer(scheduler, 6) == [6]


def test_events_carry_the_tier_as_vllm_names_it(scheduler: Scheduler) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium

    scheduler.store(1)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["disk"])
    told = [
        (event.medium, event.removed, event.locality, list(event.keys))
        for event in scheduler.manager.take_events()
    ]
    assert told == [
        (Medium.CPU, False, Locality.LOCAL, offload_keys(1)),
        (Medium.STORAGE, False, Locality.LOCAL, offload_keys(1)),
        (Medium.STORAGE, True, Locality.LOCAL, offload_keys(1)),
    ]
    assert list(scheduler.manager.take_events()) == []


def test_shutdown_closes_what_the_spec_opened(scheduler: Scheduler) -> None:
    scheduler.manager.shutdown()
    assert scheduler.closed == 1


def test_one_request_promotes_in_one_call_and_waits_once(scheduler: Scheduler) -> None:
    scheduler.store(1, 2, 3)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"])
    assert scheduler.lookup(1, 2, 3) == ["RETRY"] * 3
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 3)
    assert scheduler.bench.engine.stats().prefetches == 1
    assert scheduler.lookup(1, 2, 3) == ["HIT"] * 3
    scheduler.end_step()
    # What has left the pool again before its use is not waited for a second time.
    scheduler.bench.engine.clear(["cpu"])
    assert scheduler.lookup(1) == ["MISS"]
    scheduler.manager.on_request_finished(scheduler.context)
    assert scheduler.lookup(1) == ["RETRY"]


def test_an_aborted_request_promotes_nothing(scheduler: Scheduler) -> None:
    scheduler.store(1)
    scheduler.bench.finish_puts()
    scheduler.bench.engine.clear(["cpu"])
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.manager.on_request_finished(scheduler.context)
    scheduler.end_step()
    assert scheduler.bench.engine.stats().prefetches == 0


def test_a_request_uses_each_chunk_once(make_bench: MakeBench) -> None:
    """A chunk that a request stores and gets again after a preemption counts as used once."""
    scheduler = Scheduler(make_bench(4, dataclasses.replace(config(), cache_policy="ARC")))
    scheduler.store(1)
    scheduler.store(2)
    order = scheduler.bench.engine._decider.pool._policy.order
    for _ in range(3):
        scheduler.manager.prepare_store(offload_keys(1), scheduler.context)
    assert list(order()) == [key(1), key(2)]
    scheduler.next_request()
    scheduler.manager.prepare_store(offload_keys(1), scheduler.context)
    assert list(order()) == [key(2), key(1)]


def test_a_chunk_of_another_replica_is_asked_for_then_loaded(make_bench: MakeBench) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    remote = ScriptedRemote({chunk: payload(chunk) for chunk in (key(1), key(2))})
    scheduler = Scheduler(make_bench(4, remote=remote))
    assert scheduler.lookup(1, 2, 3) == ["RETRY"] * 3
    scheduler.end_step()
    # Chunk 3 may be asked for in a later question than the others.
    stats = scheduler.bench.engine.stats
    wait_until(lambda: (stats().remote.asked, stats().promoted) == (3, 2))
    assert scheduler.lookup(1, 2, 3) == ["HIT", "HIT", "MISS"]
    source = scheduler.manager.get_load_source(offload_keys(1)[0], scheduler.context)
    assert source is CacheHitSource.EXTERNAL_UNSPECIFIED
    scheduler.manager.prepare_load(offload_keys(1, 2), scheduler.context)
    scheduler.end_step()
    assert scheduler.bench.has_right_bytes([key(1), key(2)])
    scheduler.manager.complete_load(offload_keys(1, 2), scheduler.context)
    told = {(event.medium, event.locality) for event in scheduler.manager.take_events()}
    assert told == {(Medium.CPU, Locality.LOCAL), (Medium.STORAGE, Locality.REMOTE)}


def test_a_request_that_rules_out_the_remote_tier_gets_nothing_from_it(
    make_bench: MakeBench,
) -> None:
    remote = ScriptedRemote({key(1): payload(key(1))})
    scheduler = Scheduler(make_bench(4, remote=remote))
    scheduler.context = context_of(filtered(locality="LOCAL"))
    assert scheduler.lookup(1) == ["MISS"]
    scheduler.end_step()
    assert scheduler.bench.engine.stats().prefetches == 0
    scheduler.next_request()
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().promoted == 1)


def test_of_a_window_the_remote_gives_what_it_has(make_bench: MakeBench) -> None:
    """Where all layers have a window, vLLM looks back from the end, and a gap is not an end."""
    remote = ScriptedRemote({chunk: payload(chunk) for chunk in (key(2), key(3))})
    scheduler = Scheduler(make_bench(8, remote=remote))
    for number in (1, 2, 3, 4, 5):
        scheduler.context.set_offload_key_position(offload_keys(number)[0], 256 * number)
    assert scheduler.lookup(5, 4, 3, 2, 1) == ["RETRY"] * 5
    scheduler.end_step()
    stats = scheduler.bench.engine.stats
    wait_until(lambda: (stats().remote.asked, stats().promoted) == (5, 2))
    assert scheduler.lookup(5, 4, 3, 2, 1) == ["MISS", "MISS", "HIT", "HIT", "MISS"]
    scheduler.end_step()


def test_a_remote_that_does_not_answer_is_a_miss(make_bench: MakeBench) -> None:
    remote = ScriptedRemote()
    remote.answers = False
    scheduler = Scheduler(make_bench(4, remote=remote))
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().remote.unanswered > 0)
    assert scheduler.lookup(1) == ["MISS"]


def test_slow_steps_do_not_ask_the_remote_for_ever(make_bench: MakeBench) -> None:
    """A no is forgotten after a second or two; a step of vLLM may take longer than that."""
    scheduler = Scheduler(make_bench(4, remote=ScriptedRemote()))
    assert scheduler.lookup(1) == ["RETRY"]
    scheduler.end_step()
    wait_until(lambda: scheduler.bench.engine.stats().remote.asked == 1)
    scheduler.bench.clock.advance(30)
    assert scheduler.lookup(1) == ["MISS"]


def _offer(scheduler: Scheduler, *numbers: int) -> list[int]:
    """Offer chunks, store those taken, and return which these are."""
    offered = offload_keys(*numbers)
    output = scheduler.manager.prepare_store(offered, scheduler.context)
    assert output is not None
    taken = [numbers[offered.index(each)] for each in output.keys_to_store]
    for number, slot in zip(taken, output.store_spec.block_ids.tolist(), strict=True):
        scheduler.bench.pool.view(slot)[:] = payload(key(number))
    scheduler.manager.complete_store(output.keys_to_store, scheduler.context)
    return taken


def _refused(scheduler: Scheduler) -> list[Any]:
    return list(scheduler.manager.stores.refused.take_refused().values())


def test_the_first_chunk_without_room_is_remembered(scheduler: Scheduler) -> None:
    assert _offer(scheduler, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4]
    assert _refused(scheduler) == offload_keys(5)
    scheduler.bench.finish_puts()
    assert _offer(scheduler, 5, 6) == [5, 6]
    assert _refused(scheduler) == []


def test_a_request_refused_again_and_again_is_asked_for_less_often(scheduler: Scheduler) -> None:
    stores = scheduler.manager.stores
    scheduler.store(1, 2, 3, 4)
    scheduler.bench.finish_puts()
    assert scheduler.lookup(1, 2, 3, 4) == ["HIT"] * 4
    asked = []
    for _ in range(40):
        before = scheduler.bench.engine.stats().store_drops
        assert _offer(scheduler, 5, 6) == []
        assert _refused(scheduler) == offload_keys(5)
        asked.append(scheduler.bench.engine.stats().store_drops > before)
    assert [number for number, each in enumerate(asked) if each] == [0, 2, 6, 14, 30]
    scheduler.end_step()
    stores.refused.end_backoff(["another", scheduler.context.req_id])
    assert _offer(scheduler, 5, 6) == [5, 6]


def test_a_prompt_does_not_push_out_its_own_beginning_unless_it_is_below(
    make_bench: MakeBench,
) -> None:
    scheduler = Scheduler(make_bench(4))
    scheduler.store(1, 2, 3, 4)
    assert _offer(scheduler, 5) == []
    assert scheduler.lookup(1, 2, 3, 4, 5) == ["HIT"] * 4 + ["MISS"]
    scheduler.end_step()
    scheduler.next_request()
    assert _offer(scheduler, 5) == [5]  # another's
