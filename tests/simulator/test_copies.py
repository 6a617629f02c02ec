"""Copies between GPU and CPU RAM, over the engine's own decisions: chunks of 20 tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from simulator.engine_storage import MemoryDisk, threads_for_memory
from simulator.engine_tiers import EngineTiers
from simulator.model.replica_machine import Rates
from simulator.model.replica_model import ReplicaModel
from tests.simulator.helpers import BLOCK, CHUNK, keys, model, rates, request, run


@contextmanager
def over_cpu_ram(
    speeds: Rates, gpu_tokens: int = 1000
) -> Iterator[tuple[ReplicaModel, CacheEngine]]:
    """A model over an engine with CPU RAM alone."""
    engine = CacheEngine(
        EngineConfig(chunk_size=CHUNK),
        ChunkLayout(
            model="m", dtype="bfloat16", block_tokens=BLOCK, chunk_tokens=CHUNK, chunk_bytes=32
        ),
        Pool.allocate(50, 32),
        tier=MemoryDisk(chunks=0, chunk_bytes=32),
        make_threads=threads_for_memory,
    )
    try:
        tiers = EngineTiers(
            engine,
            chunk_tokens=CHUNK,
            view=engine.view,
            clock=lambda: 0.0,
            prefill_tokens_per_s=1.0,
        )
        yield model(tiers, speeds=speeds, gpu_tokens=gpu_tokens), engine
    finally:
        engine.close()


def chunks_of(name: str, count: int) -> list[bytes]:
    return keys(name, 100)[1::2][:count]


def test_a_chunk_is_found_in_cpu_ram_only_when_its_bytes_have_come() -> None:
    with over_cpu_ram(rates(store_tokens_per_s=10.0)) as (sim, engine):
        sim.arrive(request("a", 100), 0.0)
        # 1 + 10 s of prefill; then 100 tokens go down, 10 in a second.
        assert run(sim, 20.9) == [("a", 1, 11.0)]
        assert sim.next_s() == pytest.approx(21.0)
        assert engine.match(chunks_of("a", 5)) == []
        run(sim)
        assert engine.match(chunks_of("a", 5)) == ["cpu"] * 5
        assert sim.next_s() is None


def test_stores_follow_one_another() -> None:
    with over_cpu_ram(rates(store_tokens_per_s=5.0)) as (sim, engine):
        sim.arrive(request("a", 200), 0.0)
        # The first 100 tokens go down from 11 to 31 s, the others, computed at 22, until 51.
        run(sim, 50.9)
        assert len(engine.match(chunks_of("a", 10))) == 5
        run(sim, 51.0)
        assert len(engine.match(chunks_of("a", 10))) == 10


def test_what_is_being_stored_is_waited_for_and_not_computed_again() -> None:
    with over_cpu_ram(rates(store_tokens_per_s=10.0)) as (sim, _):
        sim.arrive(request("a", 100), 0.0)
        run(sim, 12.0)
        assert sim.clear_gpu()
        again = request("again", 95, text="a")
        sim.arrive(again, 12.0)
        assert sim.is_blocked
        run(sim, 21.0)
        sim.poke(21.0)
        run(sim)
        # Down at 21 s, 80 tokens up in 0.8 s, 15 computed in 2.5 s.
        assert again.cached.cpu == 80
        assert again.first_token_s == pytest.approx(24.3)


def test_a_request_can_be_cancelled_while_its_kv_is_stored() -> None:
    with over_cpu_ram(rates(store_tokens_per_s=10.0)) as (sim, engine):
        gone = request("a", 100, 50)
        sim.arrive(gone, 0.0)
        run(sim, 12.0)
        sim.cancel(gone, 12.0)
        run(sim)
        engine.check()
        assert engine.match(chunks_of("a", 5)) == ["cpu"] * 5


def test_steps_take_longer_while_kv_is_stored_and_no_longer() -> None:
    with over_cpu_ram(rates(store_tokens_per_s=10.0, transfer_slowdown=0.5)) as (sim, _):
        sim.arrive(request("a", 20, 4), 0.0)
        # 3 s of prefill; the store takes until 5 s, so that of three decodes one takes 2.25 s.
        assert run(sim) == [("a", 4, 8.25)]


def test_steps_take_longer_while_kv_is_loaded() -> None:
    speeds = rates(load_tokens_per_s=10.0, transfer_slowdown=0.5)
    with over_cpu_ram(speeds) as (sim, _):
        sim.arrive(request("a", 100), 0.0)
        run(sim)
        assert sim.clear_gpu()
        sim.arrive(request("again", 95, text="a"), 100.0)  # 80 tokens until 108
        sim.arrive(request("b", 10), 100.0)
        # b's 2 s take 3.
        assert run(sim)[0] == ("b", 1, 103.0)


def test_what_was_preempted_comes_back_from_cpu_ram() -> None:
    with over_cpu_ram(rates(), gpu_tokens=100) as (sim, engine):
        second = request("b", 40, 30)
        sim.arrive(request("a", 40, 50), 0.0)
        sim.arrive(second, 0.0)
        run(sim, 40.0)
        assert (second.preemptions, second.generated) == (1, 10)
        run(sim)
        # a's 9 blocks left one of b's on the GPU; of its 50 tokens 40 had been stored.
        assert sim.totals.prefilled == 40 + 40 + 10
        assert second.cached.total == 0
        engine.check()
