"""The tiers below the pool that the settings name, with their indexes and their I/O."""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from cacheengine.engine.tier_io import Clock, Lend, MakeThreads, TierIo
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import CPU
from cacheengine.residency import LowerIndex, RemoteIndex, TierIndex, Todo
from cacheengine.settings import ConfigError, EngineConfig
from cacheengine.tiers import LocalTier, NullTier, SharedTier, Tier
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.remote import RemoteTier
from cacheengine.tiers.serde import SERDE_NAMES, Serde, make_serde
from cacheengine.tiers.stores import BlobStore, RemoteUrl, StoreError, parse_remote_url
from cacheengine.tiers.stores.infinistore import InfiniStore
from cacheengine.tiers.stores.mooncake import MooncakeStore
from cacheengine.tiers.stores.redis import REDIS_SCHEMES, RedisServer, RedisStore
from warmroute_common import agent_protocol as wire
from warmroute_common.config_reader import BadValueError

logger = logging.getLogger("vllm.warmroute")


def make_tier(config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    """Return the tier that the configuration asks for.

    Raises `ConfigError` for a limit below one chunk, OSError for a directory
    that cannot be used or is another process's.
    """
    if not config.local_disk:
        return NullTier()
    tier = DiskTier(
        config.local_disk,
        layout.fingerprint(),
        payload_bytes=layout.chunk_bytes,
        capacity_bytes=config.max_local_disk_bytes,
        direct=config.disk_direct_reads,
        direct_writes=config.disk_direct_writes,
    )
    if tier.capacity_bytes < tier.item_bytes:
        tier.close()
        raise ConfigError(
            config.source,
            "max_local_disk_size",
            f"{config.max_local_disk_size} GB holds not one chunk of {tier.item_bytes} bytes",
            f"set at least {2 * tier.item_bytes / 1024**3:.3f}",
        )
    return tier


def make_remote(config: EngineConfig, layout: ChunkLayout) -> SharedTier | None:
    """Return the remote tier that the configuration asks for, if any.

    A server that cannot be reached now is a warning: its chunks are missed
    until it can. Raises `ConfigError` for what only a person can mend.
    """
    if not config.remote_url:
        return None
    config.check_remote_ready()
    url = parse_remote_url(config.remote_url)
    try:
        store = _connect(url, config.remote_url, config)
    except BadValueError as error:
        raise ConfigError(config.source, "remote_url", error.problem, error.fix) from None
    except StoreError as error:
        fix = "correct it, or remove remote_url"
        raise ConfigError(config.source, "remote_url", f"{url} {error}", fix) from None
    try:
        serde = make_serde(config.remote_serde, layout.dtype)
    except ValueError as error:
        fix = "choose another remote_serde"
        raise ConfigError(config.source, "remote_serde", str(error), fix) from None
    tier = RemoteTier(
        store,
        layout.fingerprint(),
        layout.chunk_bytes,
        serde,
        readers=_exact_serdes(layout.dtype),
        server=str(url),
    )
    # Asked for nothing in particular, so that a server that is down, or a
    # wrong password, is said now and not at the first request.
    if tier.find([hashlib.sha256(b"").digest()]) is not None:
        logger.info("remote tier: %s answers, %s", url, serde.name)
    return tier


def _connect(url: RemoteUrl, text: str, config: EngineConfig) -> BlobStore:
    if url.scheme in REDIS_SCHEMES:
        return RedisStore(RedisServer.from_url(url, ttl_s=config.remote_ttl))
    store = MooncakeStore if url.scheme == "mooncakestore" else InfiniStore
    return store.connect(text, config.extra_config)


def _exact_serdes(dtype: str) -> list[Serde]:
    """Return what can read the chunks that other settings of the fleet have stored."""
    made = []
    for name in SERDE_NAMES:
        try:
            made.append(make_serde(name, dtype))
        except ValueError:
            continue  # it cannot encode this type, so nothing was encoded by it
    return [serde for serde in made if serde.is_exact]


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
        deciding: Lend,
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
            gets, puts, clears = todo.gets[io.name], todo.puts[io.name], io.name in todo.clears
            io.start(gets, puts, deletes, asks=todo.asks, clears=clears)
        if CPU in todo.clears:
            self.io[0].free_cleared()

    def info(self) -> dict[str, wire.TierInfo]:
        """Return size and speed of each tier there is, under the engine's lock."""
        return {io.name: io.info() for io in self.io if io.index.is_there}

    def close(self, lock: threading.Lock, drain_s: float) -> bool:
        """Write what is queued, ``drain_s`` at most; False if a thread still hangs then."""
        with lock:
            for io in self.io:
                io.is_reading = False
        for io in self.io:
            io.stop()
        self._join(TierIo.join_writers, drain_s)
        with lock:
            # Puts still queued now are dropped as soon as a thread sees them.
            for io in self.io:
                io.is_writing = False
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
