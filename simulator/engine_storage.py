"""The real part of a simulated replica: its cache engine, agent and transfer server.

Disk and network speeds are modelled: `Pacer` slows threads down, `PacedTier` applies it to disk
reads and `PacedEngine` to transfers. `MemoryDisk` keeps the disk tier's chunks in memory, because
a fleet writes hundreds of chunks per second: as files they would load this machine more than
everything else, and its own disk's speed would show. `open_storage` starts all of it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from cacheengine.agent.agent import Agent
from cacheengine.agent.served_tokenizer import ServedTokenizer
from cacheengine.engine.engine import CacheEngine
from cacheengine.engine.tier_io import IoThreads, JobRunner, make_tier
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.tiers.tier import Chunk, GetOutcome, LocalTier, NullTier, PutOutcome
from cacheengine.transfer.transfer_server import TransferServer
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.agent_protocol import ReplicaIdentity
from warmroute_common.keys import DEFAULT_SEED


class MemoryDisk(LocalTier):
    """Chunks in a dictionary."""

    name = "disk"
    batch_chunks = 4

    def __init__(self, *, chunks: int, chunk_bytes: int) -> None:
        self.capacity_bytes = chunks * chunk_bytes
        self.item_bytes = chunk_bytes
        self._chunks: dict[bytes, bytes] = {}

    def scan(self) -> list[bytes]:
        """Return no keys: there was no earlier life."""
        return []

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Keep copies."""
        for key, payload in chunks:
            self._chunks[key] = bytes(payload)
        return [PutOutcome.STORED] * len(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Fill the buffers."""
        return [self._get(key, into) for key, into in chunks]

    def _get(self, key: bytes, into: memoryview) -> GetOutcome:
        payload = self._chunks.get(key)
        if payload is None:
            return GetOutcome.MISSING
        into[:] = payload
        return GetOutcome.OK

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forget chunks."""
        for key in keys:
            self._chunks.pop(key, None)

    def close(self) -> None:
        """Nothing is held open."""


class InlineJobs:
    """Takes no job, so that who has one does it at once."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Leave the job to the caller."""
        return False

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """Nothing runs."""
        return True


def threads_for_memory(name: str, count: int) -> JobRunner:
    """Return the threads of an engine over a `MemoryDisk`: only reads, which are paced, wait."""
    return InlineJobs() if name.startswith("kv-put") else IoThreads(name, count)


class Pacer:
    """A device with a fixed bandwidth, which all threads that use it share."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._late_s = 0.0

    def pass_through(self, num_bytes: int) -> None:
        """Return when this many bytes are through, after the bytes asked for earlier."""
        with self._lock:
            now_s = self._clock()
            # What the last sleep was late is made up for now: on a busy machine the
            # device would else be slower than it should.
            begin_s = max(self._free_s, now_s - self._late_s)
            self._late_s = 0.0
            due_s = self._free_s = begin_s + num_bytes / self._bytes_per_s
        if due_s > now_s:
            self._sleep(due_s - now_s)
        with self._lock:
            self._late_s = max(0.0, self._clock() - due_s)


class PacedTier(LocalTier):
    """A local tier whose reads take as long as the modelled disk's. Writes do not wait."""

    name = "disk"

    def __init__(self, tier: LocalTier, pacer: Pacer) -> None:
        self._tier = tier
        self._pacer = pacer
        self.capacity_bytes = tier.capacity_bytes
        self.item_bytes = tier.item_bytes
        self.batch_chunks = tier.batch_chunks

    def scan(self) -> list[bytes]:
        """Return what is there from an earlier life."""
        return self._tier.scan()

    def put_many(self, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store chunks at once."""
        return self._tier.put_many(chunks)

    def get_many(self, chunks: Sequence[Chunk]) -> list[GetOutcome]:
        """Read chunks, each in its turn and at the disk's speed."""
        outcomes = self._tier.get_many(chunks)
        self._pacer.pass_through(sum(len(into) for _, into in chunks))
        return outcomes

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove chunks at once."""
        self._tier.delete(keys)

    def close(self) -> None:
        """Close the tier below."""
        self._tier.close()


class PacedEngine:
    """An engine whose bytes are sent or received at the speed of the modelled network.

    Made for `TransferServer`, which takes each chunk's bytes by `view` right before it
    sends them, and for `Fetch`, which takes their place so before it receives them;
    everything else is the engine's own.
    """

    def __init__(self, engine: CacheEngine, pacer: Pacer) -> None:
        self._engine = engine
        self._pacer = pacer

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes when it is their turn to be sent or received."""
        view = self._engine.view(slot)
        self._pacer.pass_through(len(view))
        return view

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


HASH_ALGORITHM: Final = "sha256"
_GB: Final = 1024**3


@dataclass(frozen=True, kw_only=True)
class EngineStorage:
    """What `open_storage` has started; `close` ends it."""

    engine: CacheEngine
    meter: TransferMeter
    agent: Agent
    undo: contextlib.ExitStack

    def close(self) -> None:
        """Stop the agent, the transfers and the engine."""
        self.undo.close()


def open_storage(
    settings: SimulatorSettings,
    instance_id: str,
    *,
    agent_port: int = 0,
    kv_events_port: int,
    kv_replay_port: int,
) -> EngineStorage:
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
        tokenizer = ServedTokenizer(settings.tokenizer_directory)
        agent = Agent(receives, identity, config, meter, tokenizer=tokenizer)
        undo.callback(agent.stop)
        agent.start()
        return EngineStorage(engine=engine, meter=meter, agent=agent, undo=undo.pop_all())


def _engine_config(settings: SimulatorSettings, instance_id: str, agent_port: int) -> EngineConfig:
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
        disk_direct_io=False,
        # In memory, what is put does not queue: nothing is dropped because a queue is full.
        put_queue_share=0.5 if settings.disk_files else 1.0,
        # The paced device is one; more threads would only wait for each other.
        disk_read_threads=1,
        disk_write_threads=1,
    )


def _layout(settings: SimulatorSettings) -> ChunkLayout:
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


def _disk(settings: SimulatorSettings, config: EngineConfig, layout: ChunkLayout) -> LocalTier:
    if not settings.disk_chunks:
        return NullTier()
    pacer = Pacer(settings.bytes_per_s(settings.rates.disk_tokens_per_s))
    if settings.disk_files:
        return PacedTier(make_tier(config, layout), pacer)
    disk = MemoryDisk(chunks=settings.disk_chunks, chunk_bytes=settings.chunk_bytes)
    return PacedTier(disk, pacer)
