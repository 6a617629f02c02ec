"""The tiers below the pool, with their indexes and their I/O: made, started and ended together."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from cacheengine import wire
from cacheengine.engine.configured_tiers import make_remote, make_tier
from cacheengine.engine.tier_io import Clock, Deciding, MakeThreads, TierIo
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.residency import LowerIndex, RemoteIndex, TierIndex, Todo
from cacheengine.settings import EngineConfig
from cacheengine.tiers import LocalTier, SharedTier, Tier

logger = logging.getLogger("vllm.warmroute")

_END_S: Final = 5.0


class LowerTiers:
    """The local tier and, if there is one, the remote; by default those of the configuration.

    Making it scans the local tier, and starts the threads.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ChunkLayout,
        pool: Pool,
        local: LocalTier | None,
        remote: SharedTier | None,
        *,
        deciding: Deciding,
        clock: Clock,
        make_threads: MakeThreads,
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.local = make_tier(config, layout) if local is None else local
            undo.callback(self.local.close)
            self.remote = make_remote(config, layout) if remote is None else remote
            if self.remote is not None:
                undo.callback(self.remote.close)
            below: list[tuple[Tier, LowerIndex]] = [(self.local, _index_of_stored(self.local))]
            undo.pop_all()
        if self.remote is not None:
            below.append((self.remote, RemoteIndex()))
        self.indexes = [index for _, index in below]
        """The nearest tier's first."""
        self.io = [
            TierIo(
                tier,
                index,
                pool,
                config=config,
                deciding=deciding,
                clock=clock,
                make_threads=make_threads,
            )
            for tier, index in below
        ]

    def start(self, todo: Todo) -> None:
        """Begin the reads, writes, deletes and questions that were decided."""
        for io in self.io:
            deletes = todo.deletes.get(io.name, ())
            io.start(todo.gets[io.name], todo.puts[io.name], deletes, asks=todo.asks)

    def info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is, under the engine's lock."""
        return {io.name: io.info() for io in self.io if io.index.is_there}

    def close(self, lock: threading.Lock, drain_s: float) -> bool:
        """Write what is queued, ``drain_s`` at most; False if a thread still hangs then."""
        with lock:
            for io in self.io:
                io.stop_reading()
        for io in self.io:
            io.stop()
        self._join(TierIo.join_writers, drain_s)
        with lock:
            # Puts still queued now are dropped as soon as a thread sees them.
            for io in self.io:
                io.stop_writing()
        if self.remote is not None:
            # Before its threads end: calls that wait for its server fail now.
            self.remote.close()
        ended = self._join(TierIo.join, _END_S)
        self.local.close()
        return ended

    def _join(self, join: Callable[[TierIo, float], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        ended = [join(io, max(0.0, deadline_s - time.monotonic())) for io in self.io]
        return all(ended)


def _index_of_stored(local: LocalTier) -> TierIndex:
    """Return what an earlier run has stored, which is served again as far as it fits."""
    index = TierIndex(local.capacity_bytes, local.item_bytes)
    keys = local.scan()
    excess = index.adopt(keys)
    local.delete(excess)
    for key in excess:
        index.forget(key)
    if keys:
        logger.info(
            "%s tier: %d chunks of an earlier run are served again, %d were too many",
            local.name,
            len(index),
            len(excess),
        )
    return index
