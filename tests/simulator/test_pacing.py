"""Real bytes at the speed of modelled devices, on a clock of their own."""

from typing import Final

from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from simulator.engine_storage import MemoryDisk, PacedEngine, Pacer, threads_for_memory

CHUNK_BYTES: Final = 50


class Clock:
    """Passes only when something sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


def test_a_slot_is_given_out_when_the_network_has_come_to_it() -> None:
    clock = Clock()
    layout = ChunkLayout(
        model="m", dtype="bfloat16", block_tokens=10, chunk_tokens=10, chunk_bytes=CHUNK_BYTES
    )
    engine = CacheEngine(
        EngineConfig(chunk_size=10),
        layout,
        Pool.allocate(4, CHUNK_BYTES),
        tier=MemoryDisk(chunks=0, chunk_bytes=CHUNK_BYTES),
        make_threads=threads_for_memory,
    )
    paced = PacedEngine(engine, Pacer(100.0, clock=clock.read, sleep=clock.sleep))
    try:
        ended_s = []
        for slot in range(3):
            assert len(paced.view(slot)) == CHUNK_BYTES
            ended_s.append(clock.now_s)
        assert ended_s == [0.5, 1.0, 1.5]
        assert paced.layout is layout  # the rest is the engine's own
    finally:
        engine.close()
