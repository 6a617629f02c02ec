"""The real part of a simulated replica: its engine, its agent, its transfer server."""

import contextlib
from dataclasses import dataclass
from typing import Final, cast

from cacheengine.agent import Agent
from cacheengine.engine import CacheEngine, IoThreads, make_tier
from cacheengine.identity import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings import EngineConfig
from cacheengine.tiers import LocalTier, NullTier
from cacheengine.transfer import TransferServer
from simulator.settings import Settings
from simulator.storage.memory_disk import MemoryDisk, threads_for_memory
from simulator.storage.pacing import PacedEngine, PacedTier, Pacer
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.keys import DEFAULT_SEED

HASH_ALGORITHM: Final = "sha256"
_GB: Final = 1024**3


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What `open_storage` has started; `close` ends it."""

    engine: CacheEngine
    meter: TransferMeter
    agent: Agent
    undo: contextlib.ExitStack

    def close(self) -> None:
        """Stop the agent, the transfers and the engine."""
        self.undo.close()


def open_storage(
    settings: Settings,
    instance_id: str,
    *,
    agent_port: int = 0,
    kv_events_port: int,
    kv_replay_port: int,
) -> Storage:
    """Start a replica's engine, agent and transfer server, on free ports where none is given."""
    config = _engine_config(settings, instance_id, agent_port)
    layout = _layout(settings)
    with contextlib.ExitStack() as undo:
        pool = Pool.allocate(settings.cpu_chunks, settings.chunk_bytes)
        engine = CacheEngine(
            config,
            layout,
            pool,
            tier=_disk(settings, config, layout),
            make_threads=IoThreads if settings.disk_files else threads_for_memory,
        )
        undo.callback(engine.close, drain_s=1.0)
        meter = TransferMeter()
        sends, receives = (
            cast("CacheEngine", PacedEngine(engine, Pacer(settings.bytes_per_s(rate))))
            for rate in (settings.rates.peer_tokens_per_s, settings.rates.receive_tokens_per_s)
        )
        server = TransferServer(sends, (settings.host, 0), meter, secret=settings.fleet_secret)
        undo.callback(server.stop)
        server.start()
        assert server.address is not None
        identity = ReplicaIdentity(
            instance_id=instance_id,
            model=str(settings.tokenizer_directory),
            hash_algorithm=HASH_ALGORITHM,
            hash_seed=DEFAULT_SEED,
            block_tokens=settings.shape.block_tokens,
            chunk_tokens=settings.shape.chunk_tokens,
            chunk_bytes=settings.chunk_bytes,
            kv_events_port=kv_events_port,
            kv_replay_port=kv_replay_port,
            transfer_port=server.address[1],
        )
        agent = Agent(receives, identity, config, meter)
        undo.callback(agent.stop)
        agent.start()
        return Storage(engine=engine, meter=meter, agent=agent, undo=undo.pop_all())


def _engine_config(settings: Settings, instance_id: str, agent_port: int) -> EngineConfig:
    has_files = settings.disk_files and settings.disk_chunks
    disk = (settings.directory / "disk" / instance_id,) if has_files else ()
    return EngineConfig(
        chunk_size=settings.shape.chunk_tokens,
        local_disk=disk,
        max_local_disk_size=settings.disk_chunks * settings.chunk_file_bytes / _GB,
        lmcache_instance_id=instance_id,
        lmcache_worker_port=agent_port,
        agent_host=settings.host,
        fleet_secret=settings.fleet_secret,
        disk_direct_reads=False,
        # In memory, what is put does not queue: nothing must be dropped for want of a queue.
        put_queue_share=0.5 if settings.disk_files else 1.0,
        # The paced device is one; more threads would only wait for each other.
        disk_read_threads=1,
        disk_write_threads=1,
    )


def _layout(settings: Settings) -> ChunkLayout:
    return ChunkLayout(
        model=settings.model,
        dtype="bfloat16",
        block_tokens=settings.shape.block_tokens,
        chunk_tokens=settings.shape.chunk_tokens,
        chunk_bytes=settings.chunk_bytes,
        hash_algorithm=HASH_ALGORITHM,
        hash_seed=DEFAULT_SEED,
        kv_layout="simulated",
    )


def _disk(settings: Settings, config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    if not settings.disk_chunks:
        return NullTier()
    pacer = Pacer(settings.bytes_per_s(settings.rates.disk_tokens_per_s))
    if settings.disk_files:
        return PacedTier(make_tier(config, layout), pacer)
    disk = MemoryDisk(chunks=settings.disk_chunks, chunk_bytes=settings.chunk_bytes)
    return PacedTier(disk, pacer)
