"""vLLM's own tiering to a file system, driven where its scheduler hands chunks over."""

import itertools
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from bench.engine.index import key_of
from bench.ttft import BenchError

_BLOCK_TOKENS: Final = 16
_JOBS: Final = 4
"""One job is one request's chunks, which one thread moves: as many requests at once."""


class VllmTier:
    """`FileSystemTierManager` over the CPU tier of a `TieringOffloadingManager`.

    Unlike our tier it has no checksums and no limit, and keeps no list of its chunks.
    """

    def __init__(self, root: Path, chunks: int, chunk_bytes: int) -> None:
        self._chunks = chunks
        spec = TieringOffloadingSpec(_config(root, chunks, chunk_bytes))
        self._manager = spec.get_manager()
        (self._tier,) = self._manager.secondary_tiers
        self.memory: memoryview = self._tier._primary_kv_view.cast("B")
        memory = np.frombuffer(self.memory, dtype=np.uint8)
        generator = np.random.default_rng(0)
        for start in range(0, len(memory), 1 << 20):
            piece = memory[start : start + (1 << 20)]
            piece[:] = generator.integers(0, 256, len(piece), dtype=np.uint8)
        self._numbers = itertools.count()
        self._keys: list[Any] = []

    def new_keys(self) -> None:
        """Choose keys that were never used."""
        keys = (key_of(next(self._numbers)) for _ in range(self._chunks))
        self._keys = [make_offload_key(key, 0) for key in keys]

    def put(self) -> None:
        """Write all chunks from the CPU tier to files."""
        self._move(self._tier.submit_store, is_promotion=False)

    def get(self) -> None:
        """Read them back."""
        self._move(self._tier.submit_load, is_promotion=True)

    def _move(self, submit: Any, *, is_promotion: bool) -> None:
        for places in np.array_split(np.arange(self._chunks), min(_JOBS, self._chunks)):
            keys: Sequence[Any] = [self._keys[place] for place in places]
            context = ReqContext(req_id=f"request {places[0]}")
            submit(TransferJob(next(self._numbers), keys, places, is_promotion, context))
        self._tier.drain_jobs()
        if not all(result.success for result in self._tier.get_finished_jobs()):
            raise BenchError("vLLM's tiering has failed; is the disk full?")

    def close(self) -> None:
        """End its threads and free its memory."""
        self.memory.release()
        self._manager.shutdown()


def _config(root: Path, chunks: int, chunk_bytes: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(
            OffloadingGroupConfig(
                tokens_per_block=_BLOCK_TOKENS, layer_names=("layer",), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": chunks * chunk_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        },
        engine_id=f"bench-{uuid.uuid4()}",
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=_BLOCK_TOKENS, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
