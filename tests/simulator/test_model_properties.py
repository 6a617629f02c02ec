"""Any run of arrivals, departures and looks: nothing leaks, everyone is served."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from simulator.engine_storage import MemoryDisk, threads_for_memory
from simulator.engine_tiers import EngineTiers
from simulator.model.replica_model import ReplicaModel
from simulator.model.sim_request import SimRequest
from tests.cacheengine.helpers import wait_until
from tests.simulator.helpers import BLOCK, CHUNK, model, request

Act = tuple[str, int, int, float]

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "cancel", "look", "clear"]),
        st.integers(0, 4),
        st.integers(1, 190),
        st.floats(0.0, 30.0),
    ),
    max_size=30,
)


def play(sim: ReplicaModel, acts: Sequence[Act]) -> list[SimRequest]:
    """Do what is asked, checking after each; return the requests."""
    asked: list[SimRequest] = []
    now_s = 0.0
    for number, (act, which, size, wait_s) in enumerate(acts):
        now_s += wait_s
        if act == "ask":
            asked.append(
                request(f"r{number}", size, 1 + size % 7, text=f"text{which}", emit_every=which)
            )
            sim.arrive(asked[-1], now_s)
        elif act == "cancel" and asked:
            sim.cancel(asked[which % len(asked)], now_s)
        elif act == "look":
            sim.poke(now_s)
        elif act == "clear":
            sim.advance(now_s)
            sim.clear_gpu()
        sim.check()
    return asked


def check_served(sim: ReplicaModel, asked: Sequence[SimRequest]) -> None:
    """All that were not cancelled have their tokens, each computed or found once."""
    assert (len(sim.waiting), len(sim.running), len(sim.loading)) == (0, 0, 0)
    assert sim.cache.held_blocks == 0
    assert all(each.is_over for each in asked)
    assert sim.totals.finished + sim.totals.cancelled == len(asked)
    served = [each for each in asked if each.finished_s is not None]
    assert len(served) == sim.totals.finished
    for each in served:
        assert each.first_token_s is not None
        assert each.arrived_s < each.first_token_s <= (each.finished_s or 0.0)
        assert each.generated == each.output_tokens
        assert each.computed == each.total_tokens
        assert each.cached.total <= each.prompt_tokens


@given(ACTS)
def test_on_a_gpu_alone(acts: list[Act]) -> None:
    sim = model(gpu_tokens=200, max_sequences=3, max_batched_tokens=30)
    asked = play(sim, acts)
    sim.advance(1e9)
    sim.check()
    check_served(sim, asked)
    if not (sim.totals.cancelled or sim.totals.preempted):
        found = sum(each.cached.total for each in asked)
        assert sim.totals.prefilled == sum(each.prompt_tokens for each in asked) - found


@settings(max_examples=40)
@given(ACTS, st.integers(1, 12), st.integers(0, 12))
def test_over_a_real_engine(acts: list[Act], cpu_chunks: int, disk_chunks: int) -> None:
    layout = ChunkLayout(
        model="m", dtype="bfloat16", block_tokens=BLOCK, chunk_tokens=CHUNK, chunk_bytes=32
    )
    engine = CacheEngine(
        EngineConfig(chunk_size=CHUNK, disk_read_threads=1, put_queue_share=1.0),
        layout,
        Pool.allocate(cpu_chunks, 32),
        tier=MemoryDisk(chunks=disk_chunks, chunk_bytes=32),
        make_threads=threads_for_memory,
    )
    try:
        tiers = EngineTiers(
            engine,
            chunk_tokens=CHUNK,
            view=engine.view,
            clock=lambda: 0.0,
            prefill_tokens_per_s=1.0,
            speed=1e9,
        )
        sim = model(tiers, gpu_tokens=200, max_sequences=3, max_batched_tokens=30)
        asked = play(sim, acts)
        now_s = 1e4

        def is_served() -> bool:
            nonlocal now_s
            now_s += 1e4
            sim.poke(now_s)
            return not (sim.waiting or sim.running or sim.loading)

        wait_until(is_served)
        sim.check()
        engine.check()
        check_served(sim, asked)
        assert tiers.wrong_chunks == 0
        wait_until(lambda: engine.expire_pins() == 0 and engine.stats().cpu_held_bytes == 0)
    finally:
        engine.close()
