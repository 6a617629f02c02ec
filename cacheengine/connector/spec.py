"""The `OffloadingSpec` that vLLM loads: builds the engine's parts in vLLM's processes.

`WarmrouteConnector` names it to vLLM's offloading. The scheduler process gets the manager, the
engine and the agent; each worker process gets a copy worker. Written against ``v1/kv_offload`` of
vLLM 0.32 and 0.33; that interface is experimental.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cacheengine.agent.agent import Agent
from cacheengine.agent.served_tokenizer import ServedTokenizer
from cacheengine.connector.copy_worker import CpuCopyWorker, join_copies
from cacheengine.connector.manager import WarmrouteManager
from cacheengine.connector.model_identity import (
    ModelIdentity,
    check_attention,
    check_groups,
    locate,
)
from cacheengine.connector.pool_region import PoolRegion
from cacheengine.engine.engine import CacheEngine
from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.identity.kv_versions import KvVersions
from cacheengine.launch.vllm_launch import ReplicaSettings, config_of_rank
from cacheengine.memory import Pool
from cacheengine.record import TransferMeter
from cacheengine.settings.engine_config import EngineConfig
from cacheengine.settings.lmcache_file import load_engine_config
from cacheengine.tiers.remote import lossy_name
from cacheengine.transfer.transfer_server import TransferServer
from warmroute_common.agent_protocol import ReplicaIdentity

logger = logging.getLogger("vllm.warmroute")

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY: Final = Path("/dev/shm")
_SHUTDOWN_S: Final = 4.0
"""vLLM kills its processes 5 s after it has told them to end."""
_AGENT_STOP_S: Final = 1.0
_SERVER_STOP_S: Final = 0.5
_EXIT_GRACE_S: Final = 30.0
"""Time for an orderly exit after SIGTERM; the engine's own limits are well below."""


class RankMemory(NamedTuple):
    """The memory that a rank keeps KV in; the ranks of a replica exchange it at start."""

    memory: str
    """The machine, and the mount of its /dev/shm: each container may have its own."""
    kv_bytes_per_block: int


def check_ranks(kv_bytes_per_block: int) -> None:
    """Raise ValueError, saying what to do, if this replica's ranks cannot share chunk rows.

    A chunk is one row of shared memory, in which every rank has a slice of equal size. All workers
    of a replica must call it at the same time, while vLLM builds its KV cache.
    """
    memory = f"{_BOOT_ID.read_text().strip()}:{_SHARED_MEMORY.stat().st_dev}"
    ranks = _gather(RankMemory(memory, kv_bytes_per_block))
    machines = len({rank.memory for rank in ranks})
    if machines > 1:
        raise ValueError(
            f"the {len(ranks)} tensor or pipeline parallel ranks of this replica are on {machines} "
            "machines (or in containers that do not share /dev/shm), but the cache engine needs "
            "them on one machine. Start one replica on each machine, or start vLLM without the "
            "engine (no --kv-transfer-config)"
        )
    sizes = [rank.kv_bytes_per_block for rank in ranks]
    if len(set(sizes)) > 1:
        raise ValueError(
            "the pipeline stages of this replica keep different amounts of KV "
            f"({', '.join(map(str, sizes))} bytes per block), but the cache engine needs equal "
            "amounts. Choose a --pipeline-parallel-size that divides the number of layers, equal "
            "stages in VLLM_PP_LAYER_PARTITION, or start vLLM without the engine "
            "(no --kv-transfer-config)"
        )


def _gather(own: RankMemory) -> list[RankMemory]:
    if not torch.distributed.is_initialized():
        return [own]
    try:
        group = get_inner_dp_world_group()
    except AssertionError:  # no data parallel ranks: the world is one replica
        group = get_world_group()
    ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(ranks, own, group=group.cpu_group)
    return ranks


def exit_with_parent(grace_s: float = _EXIT_GRACE_S) -> None:
    """End this process soon after its parent: by SIGTERM, then by force after ``grace_s``.

    vLLM's API server cannot end it when killed. It would keep the model's memory, the agent's port
    and the disk tier's lock, so that no restart could succeed.

    Does nothing in a process that `multiprocessing` did not start: its parent is a shell, which may
    end earlier.
    """
    if multiprocessing.parent_process() is None:
        return
    parent = os.getppid()
    watch = threading.Thread(
        target=_wait_for_parent, args=(parent, grace_s), name="kv-parent-watch", daemon=True
    )
    watch.start()


def _wait_for_parent(parent: int, grace_s: float) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        pass  # it has ended already
    except OSError as error:
        logger.warning(
            "cannot watch the API server (%s): if you kill it, also kill this engine process", error
        )
        return
    else:
        # The parent may have ended before, and its process number may be another process's now.
        if os.getppid() == parent:
            select.select([descriptor], [], [])
        os.close(descriptor)
    logger.error("the API server (process %d) has ended; the engine process ends too", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)


class WarmrouteSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Builds the manager, engine and agent in the scheduler process, copy workers in the others.

    All of them use the same shared memory. Its layout (bytes of a chunk row, each rank's slice of
    it) is vLLM's own, so that vLLM's CUDA copy worker fits unchanged.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return no metrics: the agent serves the engine's on its ``/metrics``."""
        return {}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # since vLLM 0.33
        return ()

    def __init__(self, config: OffloadingConfig) -> None:
        rank = config.parallel.data_parallel_rank_local or 0
        self.engine_config: EngineConfig = config_of_rank(load_engine_config(), rank)
        self.settings = ReplicaSettings.from_extra_config(config.extra_config)
        self.model = ModelIdentity.from_extra_config(config.extra_config)
        self.engine_config.check_hash_algorithm(self.model.hash_algorithm)
        super().__init__(_with_engine_settings(config, self.engine_config))
        # The parent class's attributes, declared again for the type checker.
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        self._ends_s = 0.0
        self._check_supported()

    def _check_supported(self) -> None:
        check_groups([group.layer_names for group in self.config.groups])
        chunk_tokens = self.tokens_per_block[0] * self.blocks_per_chunk
        if chunk_tokens != self.engine_config.chunk_size:
            raise ValueError(
                f"chunk_size: {self.engine_config.chunk_size} tokens in the cache configuration, "
                f"but {chunk_tokens} in vLLM's; start the replica with `warmroute replica`, "
                'or set "block_size" in kv_connector_extra_config to chunk_size'
            )
        if self.num_chunks == 0 and self.config.worker_kv_bytes_per_block > 0:
            needed_gb = 2 * self.kv_bytes_per_chunk / 1024**3
            raise ValueError(
                f"max_local_cpu_size: {self.engine_config.max_local_cpu_size} GB does not hold one "
                f"chunk of {self.kv_bytes_per_chunk} bytes; set at least {needed_gb:.3f}"
            )

    def _uses_shared_region(self) -> bool:
        return True

    def _open_region(self, rank: int | None) -> PoolRegion:
        return PoolRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
            hugepages=self.engine_config.local_cpu_use_hugepages,
            keep=self.engine_config.keep_cpu_dir,
        )

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return a copy worker over this rank's slice of every chunk row.

        Raises ValueError for a model or a set of ranks that the engine does not support.
        """
        check_attention(self.config.groups[0].layer_names, self.blocks_per_chunk)
        check_ranks(self.config.worker_kv_bytes_per_block)
        region = self._open_region(0 if self.replicated_layout else self.config.parallel.rank)
        try:
            if current_platform.is_cuda_alike() or current_platform.is_xpu():
                worker = CPUOffloadingWorker(
                    kv_caches=kv_caches,
                    blocks_per_chunk=self.blocks_per_chunk,
                    num_cpu_chunks=self.num_chunks,
                    mmap_region=region,
                )
                join_copies(worker)
                return worker
            return CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        except BaseException:
            region.cleanup()
            raise

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this process's copy worker; create it in the first call."""
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def get_manager(self) -> OffloadingManager:
        """Return this replica's manager; the first call starts the engine and the agent."""
        if self._manager is None:
            self._manager = self._create_manager()
        return self._manager

    def _create_manager(self) -> WarmrouteManager:
        with contextlib.ExitStack() as undo:
            region = self._open_region(rank=None)
            undo.callback(region.cleanup)
            region.check_shared()
            region.forget_name()
            pool = Pool(
                region.create_kv_memoryview(),
                num_slots=self.num_chunks,
                slot_bytes=self.kv_bytes_per_chunk,
            )
            layout = self._layout()
            is_kept = self.engine_config.keep_cpu_dir is not None
            seals = region.seals(layout.fingerprint()) if is_kept else None
            engine = CacheEngine(self.engine_config, layout, pool, seals=seals)
            undo.callback(self._close, engine)
            engine.start_keeping()
            meter = TransferMeter()
            transfer_port = self._serve_transfers(engine, meter, undo)
            versions = KvVersions(locate)
            undo.callback(versions.close)
            identity = self._identity(transfer_port)
            directory = Path(self.model.tokenizer) if self.model.tokenizer else None
            tokenizer = ServedTokenizer(directory, self.settings.chat_template)
            agent = Agent(
                *(engine, identity, self.engine_config, meter, versions), tokenizer=tokenizer
            )
            # The agent stops before everything that its jobs and answers use.
            undo.callback(agent.stop, _AGENT_STOP_S)
            agent.start()
            exit_with_parent()
            undo.callback(self._begin_shutdown)
            # From here on the manager's shutdown releases all of it.
            return WarmrouteManager(
                engine,
                group_idx=self.config.groups[0].group_id,
                enable_events=self.config.enable_kv_cache_events,
                on_shutdown=undo.pop_all().close,
                versions=versions,
            )

    def _begin_shutdown(self) -> None:
        self._ends_s = time.monotonic() + _SHUTDOWN_S

    def _close(self, engine: CacheEngine) -> None:
        """Write queued puts in the time that is left; a third of it is for I/O that has begun."""
        engine.close(drain_s=max(0.0, self._ends_s - time.monotonic()) * 2 / 3)

    def _serve_transfers(
        self, engine: CacheEngine, meter: TransferMeter, undo: contextlib.ExitStack
    ) -> int | None:
        """Serve chunks to other replicas; return the port, or None without distributed_url."""
        address = self.engine_config.transfer_address
        if address is None:
            return None
        server = TransferServer(engine, address, meter, secret=self.engine_config.fleet_secret)
        undo.callback(server.stop, _SERVER_STOP_S)
        server.start()
        assert server.address is not None
        return server.address[1]

    def _layout(self) -> ChunkLayout:
        parallel, model, engine = self.config.parallel, self.config.model, self.engine_config
        return ChunkLayout(
            model=self.model.model,
            dtype=model.dtype,
            block_tokens=self.tokens_per_block[0],
            chunk_tokens=engine.chunk_size,
            chunk_bytes=self.kv_bytes_per_chunk,
            parallel=(
                f"tp{parallel.tp_size}-pp{parallel.pp_size}-pcp{parallel.pcp_size}"
                f"-dcp{parallel.dcp_size}-replicated{int(self.replicated_layout)}"
            ),
            hash_algorithm=self.model.hash_algorithm,
            hash_seed=self._hash_seed(),
            kv_layout=f"{self.config.kv_cache_layout}-{current_platform.device_type}",
            weights=self.model.weights,
            model_options=self.model.options,
            build=self.model.build,
            attention=self.model.attention,
            pages=self.model.pages,
            lossy=lossy_name(engine.remote_serde, model.dtype) if engine.remote_url else "",
        )

    def _hash_seed(self) -> str:
        # vLLM derives its root hash later, from the same environment. It is random only without
        # PYTHONHASHSEED and with a non-cryptographic hash, and `warmroute replica` sets a seed.
        seed = os.environ.get("PYTHONHASHSEED")
        return seed if seed is not None else str(get_none_hash_seed())

    def _identity(self, transfer_port: int | None) -> ReplicaIdentity:
        return ReplicaIdentity(
            instance_id=self.engine_config.lmcache_instance_id,
            model=self.config.model.name,
            hash_algorithm=self.model.hash_algorithm,
            hash_seed=self._hash_seed(),
            block_tokens=self.tokens_per_block[0],
            chunk_tokens=self.engine_config.chunk_size,
            chunk_bytes=self.kv_bytes_per_chunk,
            kv_events_port=self._port_of_rank(self.settings.kv_events_port),
            kv_replay_port=self._port_of_rank(self.settings.kv_replay_port),
            transfer_port=transfer_port,
        )

    def _port_of_rank(self, port: int | None) -> int | None:
        # vLLM's publisher adds the rank's number among the data parallel ranks of all machines.
        return port and port + self.config.parallel.data_parallel_index


def _with_engine_settings(config: OffloadingConfig, engine: EngineConfig) -> OffloadingConfig:
    """Return vLLM's offloading configuration with the engine's settings."""
    extra = {
        **config.extra_config,
        "cpu_bytes_to_use": engine.max_local_cpu_bytes,
        # With it generated tokens are stored too: the next turn of a chat finds its own answer.
        "offload_prompt_only": not engine.save_decode_cache,
    }
    return dataclasses.replace(config, extra_config=extra)
