"""Small engines for tests, and the bytes that belong to a key."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.engine_lock import EngineLock
from cacheengine.engine.tier_io import TierStack
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.residency.decider import Decider
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import LocalTier, SharedTier

CHUNK_BYTES = 8192
GB = 1024**3


class FakeClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(chunk_key: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The bytes that a test stores under a key: different for every key, not periodic."""
    return hashlib.shake_128(chunk_key).digest(chunk_bytes)


def layout(chunk_bytes: int = CHUNK_BYTES, model: str = "m") -> ChunkLayout:
    return ChunkLayout(
        model=model, dtype="bfloat16", block_tokens=16, chunk_tokens=256, chunk_bytes=chunk_bytes
    )


def disk_items_gb(items: int, chunk_bytes: int = CHUNK_BYTES) -> float:
    """A max_local_disk_size that holds exactly ``items`` chunks."""
    return items * (chunk_bytes + 4096) / GB


def config(
    disk: Path | None = None, *, disk_items: int = 100, local_cpu: bool = True, share: float = 1.0
) -> EngineConfig:
    return EngineConfig(
        local_cpu=local_cpu,
        local_disk=(disk,) if disk else (),
        max_local_disk_size=disk_items_gb(disk_items) if disk else 0.0,
        put_queue_share=share,
        disk_read_threads=4,
        disk_write_threads=2,
    )


class InterruptedLock:
    """Stands where an engine's `EngineLock` does, for its calls alone; I/O uses the real one.

    After ``after`` loans it does something once, between two portions of a call.
    """

    def __init__(
        self, engine: CacheEngine, after: int = 0, meanwhile: Callable[[], object] | None = None
    ) -> None:
        self._real = engine._lock
        self.left = after
        self.meanwhile = meanwhile
        self.listeners = self._real.listeners
        engine._lock = cast("EngineLock", self)

    def __enter__(self) -> Decider:
        return self._real.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._real.__exit__(kind, *rest)
        self.left -= 1
        if self.left == 0 and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


def tier_stack(engine: CacheEngine) -> TierStack:
    """The tiers below an engine's pool and their I/O."""
    assert isinstance(engine._io, TierStack)
    return engine._io


class ManualThreads:
    """Stands where `IoThreads` does; jobs run when told."""

    def __init__(self, name: str, count: int) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.stopped = False

    def submit(self, job: Callable[[], None]) -> bool:
        if not self.stopped:
            self.jobs.append(job)
        return not self.stopped

    def stop(self) -> None:
        self.stopped = True

    def join(self, timeout_s: float) -> bool:
        while self.jobs:
            self.jobs.pop(0)()
        return True


class Bench:
    """An engine, its pool, and short ways to store chunks and to check their bytes."""

    def __init__(
        self,
        num_slots: int,
        engine_config: EngineConfig | None = None,
        *,
        tier: LocalTier | None = None,
        remote: SharedTier | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.pool = Pool.allocate(num_slots, CHUNK_BYTES)
        self.clock = FakeClock()
        self.engine = CacheEngine(
            engine_config or config(),
            layout(),
            self.pool,
            clock=clock or self.clock,
            tier=tier,
            remote=remote,
        )

    def store(self, chunks: Sequence[bytes]) -> tuple[bytes, ...] | None:
        """Store chunks that are not there; return their keys, or None without room."""
        reservation = self.engine.prepare_store(chunks)
        if reservation is None:
            return None
        for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.pool.view(slot)[:] = payload(chunk)
        self.engine.complete_store(reservation.keys)
        return reservation.keys

    def has_right_bytes(self, chunks: Sequence[bytes]) -> bool:
        """Hold chunks, compare every byte, release them."""
        slots = self.engine.hold(chunks)
        try:
            return all(
                bytes(self.pool.view(slot)) == payload(chunk)
                for chunk, slot in zip(chunks, slots, strict=True)
            )
        finally:
            self.engine.release(chunks)

    def keep_below_only(self, chunks: Sequence[bytes]) -> None:
        """Store chunks, write them to the lower tiers, and clear CPU RAM."""
        self.store(chunks)
        self.finish_puts()
        self.engine.clear(["cpu"])

    def finish_puts(self) -> None:
        """Return when no put is queued or under way."""
        wait_until(lambda: self.engine.stats().put_queue_bytes == 0)

    def finish_reads(self) -> None:
        """Return when no chunk is on its way into the pool."""

        def all_there() -> bool:
            with self.engine._lock as decider:
                return all(map(decider.pool.is_ready, decider.pool))

        wait_until(all_there)

    def promote(
        self, chunks: Sequence[bytes], pin_s: float = 10.0, holder: str | None = None
    ) -> tuple[int, int, int]:
        """Promote and wait; return (resident, promoted, missing)."""
        promotion = self.engine.promote(chunks, pin_s=pin_s, holder=holder)
        assert promotion.wait(20)
        return promotion.counts.resident, promotion.counts.promoted, promotion.counts.missing


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; AssertionError after far too long."""
    pause = threading.Event()
    until_s = time.monotonic() + 120.0
    while time.monotonic() < until_s:
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came to be")
