"""Requests and models with round numbers."""

import hashlib
import threading
from collections.abc import Sequence

from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from simulator.engine_storage import MemoryDisk, PacedTier, Pacer, threads_for_memory
from simulator.engine_tiers import EngineTiers
from simulator.model.lower_tier_view import LowerTiers, NoLowerTiers
from simulator.model.model_events import TokenProgress
from simulator.model.replica_machine import Rates, Shape
from simulator.model.replica_model import ReplicaModel
from simulator.model.sim_request import SimRequest

BLOCK = 10
CHUNK = 20
CHUNK_BYTES = 64


def shape(**changes: int) -> Shape:
    sizes = {
        "gpu_tokens": 1000,
        "block_tokens": BLOCK,
        "chunk_tokens": CHUNK,
        "max_batched_tokens": 100,
        "max_sequences": 8,
    }
    return Shape(**(sizes | changes))


def rates(**changes: float) -> Rates:
    """A step takes 1 s, a prefilled token 0.1 s, a decoding sequence 0.5 s, a load 0.01 s."""
    speeds = {
        "prefill_tokens_per_s": 10.0,
        "step_s": 1.0,
        "decode_s_per_sequence": 0.5,
        "load_tokens_per_s": 100.0,
    }
    return Rates(**(speeds | changes))


def model(
    tiers: LowerTiers | None = None, *, speeds: Rates | None = None, **sizes: int
) -> ReplicaModel:
    return ReplicaModel(shape(**sizes), speeds or rates(), tiers or NoLowerTiers())


def keys(name: str, count: int) -> list[bytes]:
    """``count`` keys of the prompt called ``name``; as in a chain, all depend on the name."""
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(count)]


def request(
    request_id: str,
    prompt_tokens: int,
    output_tokens: int = 1,
    *,
    text: str | None = None,
    emit_every: int = 0,
    shared: Sequence[bytes] = (),
) -> SimRequest:
    """A request of its own text, or of a named one; ``shared`` blocks stand before it."""
    own = keys(text or request_id, 100)[len(shared) :]
    total = (prompt_tokens + output_tokens - 1) // BLOCK
    blocks = [*shared, *own][:total]
    per_chunk = CHUNK // BLOCK
    return SimRequest(
        id=request_id,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_keys=blocks,
        chunk_keys=blocks[per_chunk - 1 :: per_chunk],
        emit_every=emit_every,
    )


def run(sim: ReplicaModel, until_s: float = 1e9) -> list[tuple[str, int, float]]:
    """Advance, check, and return the news as (id, tokens, time)."""
    sim.advance(until_s)
    sim.check()
    return [told(each) for each in sim.take_progress()]


def told(news: TokenProgress) -> tuple[str, int, float]:
    return (news.request.id, news.generated, round(news.at_s, 6))


class Bench:
    """A model over an engine whose disk reads wait until `read` lets them."""

    def __init__(self, cpu_chunks: int, disk_chunks: int, gpu_tokens: int = 200) -> None:
        self.may_read = threading.Event()
        disk = MemoryDisk(chunks=disk_chunks, chunk_bytes=CHUNK_BYTES)
        layout = ChunkLayout(
            model="m",
            dtype="bfloat16",
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            chunk_bytes=CHUNK_BYTES,
        )
        pacer = Pacer(1e9, sleep=lambda _: self.waits())
        self.engine = CacheEngine(
            EngineConfig(chunk_size=CHUNK, disk_read_threads=1, put_queue_share=1.0),
            layout,
            Pool.allocate(cpu_chunks, CHUNK_BYTES),
            tier=PacedTier(disk, pacer),
            make_threads=threads_for_memory,
        )
        self.promoted = threading.Event()
        self.now_s = 0.0
        self.tiers = EngineTiers(
            self.engine,
            chunk_tokens=CHUNK,
            view=self.engine.view,
            clock=lambda: self.now_s,
            prefill_tokens_per_s=1.0,
            on_promoted=self.promoted.set,
        )
        self.model: ReplicaModel = model(self.tiers, gpu_tokens=gpu_tokens)

    def waits(self) -> None:
        assert self.may_read.wait(20)

    def serve(self, name: str, prompt_tokens: int, at_s: float) -> None:
        """Compute a prompt, all alone."""
        self.model.arrive(request(name, prompt_tokens, text=name), at_s)
        run(self.model)
        self.engine.check()

    def close(self) -> None:
        self.may_read.set()
        self.engine.close()
