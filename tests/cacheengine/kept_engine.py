"""An engine whose pool is kept, as `WarmrouteSpec` puts it together."""

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from cacheengine.engine.engine import CacheEngine
from cacheengine.kept_pool import PoolSeals, open_pool_file
from cacheengine.memory import Pool
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import LocalTier
from tests.cacheengine.helpers import CHUNK_BYTES, Bench, FakeClock, config, layout, wait_until


class KeptEngine(Bench):
    """The engine over a directory's pool; the file is locked until `close`."""

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        engine_config: EngineConfig | None = None,
        *,
        model: str = "m",
        tier: LocalTier | None = None,
    ) -> None:
        index = num_slots * CHUNK_BYTES
        size = index + PoolSeals.size_bytes(num_slots)
        self.file = open_pool_file(directory, size, wait_s=5.0)
        memory = memoryview(mmap.mmap(self.file, size))
        identity = layout(model=model)
        self.pool = Pool(memory[:index], num_slots, CHUNK_BYTES)
        self.clock = FakeClock()
        self.seals = PoolSeals(memory[index:], identity.fingerprint(), num_slots)
        self.engine = CacheEngine(
            engine_config or config(),
            identity,
            self.pool,
            seals=self.seals,
            clock=self.clock,
            tier=tier,
        )
        self.engine.start_keeping()

    def finish_keeping(self) -> None:
        """Return when all chunks are checked and sealed."""

        def is_done() -> bool:
            with self.engine._lock as decider:
                pool = decider.pool
                is_checked = all(pool.is_ready(each) or pool.is_hidden(each) for each in pool)
                return is_checked and len(pool.ready_keys()) == len(self.seals.read())

        wait_until(is_done)

    def keys(self) -> set[bytes]:
        """Return the chunks that may be used."""
        with self.engine._lock as decider:
            return {*decider.pool.ready_keys()}

    def close(self, *, in_order: bool = True) -> None:
        """End the engine; otherwise leave everything, as a killed process does."""
        if in_order:
            self.engine.check()
            self.engine.close()
        else:
            assert self.engine._keeper is not None
            self.engine._keeper.stop(0.0)
            assert self.engine._keeper.join(20.0)
            # The mapping has a descriptor of its own, with the same lock.
            fcntl.flock(self.file, fcntl.LOCK_UN)
        os.close(self.file)

    def store_whole(self, chunks: Sequence[bytes]) -> None:
        """Store chunks; return when they are sealed."""
        assert self.store(chunks) is not None
        self.finish_keeping()
