"""The bookkeeping of a million chunks: its memory, and the time of a lookup."""

import gc
import hashlib
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from bench.engine.cases import Case
from bench.ttft import BenchError
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import Chunk, GetOutcome, LocalTier, PutOutcome

LOOKUP_CHUNKS: Final = 64
LOOKUP_BAR_US: Final = 50.0
MEMORY_BAR_BYTES: Final = {"cpu": 450.0, "disk": 300.0}

_LOOKUPS_A_ROUND: Final = 200

_T = TypeVar("_T")


class FullTier(LocalTier):
    """A tier that holds N chunks without any bytes: only the engine's own memory counts."""

    name = "disk"
    item_bytes = 1

    def __init__(self, chunks: int) -> None:
        self.capacity_bytes = chunks
        self._chunks = chunks

    def scan(self) -> list[bytes]:
        """Return all keys."""
        return [key_of(number) for number in range(self._chunks)]

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Refuse."""
        return [PutOutcome.FAILED] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Refuse."""
        return [GetOutcome.FAILED] * len(chunks)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def index(chunks: int, rounds: int) -> Iterator[Case]:
    """Measure memory and lookups of an engine that knows N chunks, by tier.

    The limit is a plain dict with the same keys.
    """
    plain, plain_bytes = _traced(lambda: {key_of(number): number for number in range(chunks)})
    for tier, make in (("cpu", _engine_full_in_cpu), ("disk", _engine_full_on_disk)):
        engine, used_bytes = _traced(partial(make, chunks))
        yield Case(
            name=f"index, {chunks} chunks in {tier}: memory of one",
            unit="B",
            ours=[used_bytes / chunks],
            limit=[plain_bytes / chunks],
            bar=MEMORY_BAR_BYTES[tier],
        )
        name = f"index, {chunks} chunks in {tier}: lookup of {LOOKUP_CHUNKS}"
        yield _lookups(engine, plain, name, rounds)
        engine.close()


def _lookups(engine: CacheEngine, plain: dict[bytes, int], name: str, rounds: int) -> Case:
    def match(keys: Sequence[bytes]) -> int:
        return len(engine.match(keys))

    def dict_get(keys: Sequence[bytes]) -> int:
        return len([plain.get(key) for key in keys])

    ours_us: list[float] = []
    limit_us: list[float] = []
    turns = [(ours_us, match), (limit_us, dict_get)]
    generator = random.Random(1)
    for number in range(rounds * _LOOKUPS_A_ROUND):
        first = generator.randrange(max(1, len(plain) - LOOKUP_CHUNKS))
        numbers = range(first, min(first + LOOKUP_CHUNKS, len(plain)))
        for times, step in turns if number % 2 else turns[::-1]:
            # New objects, like those of a request: their hashes are not known yet.
            keys = [key_of(each) for each in numbers]
            began_s = time.perf_counter()
            found = step(keys)
            times.append((time.perf_counter() - began_s) * 1e6)
            if found != len(keys):
                raise BenchError(f"{name}: {found} of {len(keys)} chunks found")
    return Case(name=name, unit="us", ours=ours_us, limit=limit_us, bar=LOOKUP_BAR_US)


def _engine_full_in_cpu(chunks: int) -> CacheEngine:
    engine = CacheEngine(EngineConfig(), layout(1), Pool.allocate(chunks, 1), tier=FullTier(0))
    for start in range(0, chunks, LOOKUP_CHUNKS):
        keys = [key_of(n) for n in range(start, min(start + LOOKUP_CHUNKS, chunks))]
        engine.prepare_store(keys)
        engine.complete_store(keys)
    return engine


def _engine_full_on_disk(chunks: int) -> CacheEngine:
    return CacheEngine(EngineConfig(), layout(1), Pool.allocate(1, 1), tier=FullTier(chunks))


def _traced(make: Callable[[], _T]) -> tuple[_T, int]:
    """Return what ``make`` makes and the bytes that Python allocated and kept for it."""
    gc.collect()
    tracemalloc.start(1)
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def key_of(number: int) -> bytes:
    """Return the key of chunk ``number``: 32 bytes, as keys are."""
    return hashlib.sha256(number.to_bytes(8)).digest()


def layout(chunk_bytes: int) -> ChunkLayout:
    """Return a layout of chunks of 256 tokens."""
    return ChunkLayout(
        model="bench", dtype="int8", block_tokens=16, chunk_tokens=256, chunk_bytes=chunk_bytes
    )
