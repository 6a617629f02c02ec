"""The cpu tier compared with memcpy: copies between vLLM's KV cache and the pool."""

import ctypes
import random
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from bench.engine.cases import Case, Contender, in_turns, size
from bench.ttft import BenchError
from cacheengine.connector.copy_worker import CpuCopyWorker
from cacheengine.connector.pool_region import PoolRegion

_LAYERS: Final = 8
_BLOCKS_PER_CHUNK: Final = 2


class CopyRig:
    """The copy worker over a KV cache with a tensor per layer, and a real shared region."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        page_bytes = chunk_bytes // (_LAYERS * _BLOCKS_PER_CHUNK)
        self.chunks = chunks
        self.num_blocks = chunks * _BLOCKS_PER_CHUNK
        kv = [
            torch.full((self.num_blocks, page_bytes), 1, dtype=torch.int8) for _ in range(_LAYERS)
        ]
        region = PoolRegion(
            engine_id=f"bench-{uuid.uuid4()}",
            num_chunks=chunks,
            rank=0,
            kv_bytes_per_chunk=chunk_bytes,
            cpu_page_size=chunk_bytes,
        )
        region.forget_name()
        self.rows: Any = region.base_tensor.view(chunks, chunk_bytes)
        self.plain: Any = torch.full((chunks, chunk_bytes), 2, dtype=torch.int8)
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, page_bytes) for tensor in kv],
            group_data_refs=[[CanonicalKVCacheRef(i, page_bytes) for i in range(_LAYERS)]],
        )
        self._worker = CpuCopyWorker(caches, _BLOCKS_PER_CHUNK, region)

    def transfer(self, blocks: Sequence[int], *, store: bool) -> None:
        """Copy all chunks, as vLLM has it done, and wait for the end."""
        gpu = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        cpu = CPULoadStoreSpec(range(self.chunks))
        if store:
            submitted = self._worker.submit_store(1, gpu, cpu)
        else:
            submitted = self._worker.submit_load(1, cpu, gpu)
        self._worker.wait({1})
        if not submitted or not all(result.success for result in self._worker.get_finished()):
            raise BenchError("the copy worker failed")

    def memcpy(self, *, store: bool) -> None:
        """Copy as many bytes between the pool and one tensor, a chunk at a time."""
        into, source = (self.rows, self.plain) if store else (self.plain, self.rows)
        into_at, source_at, chunk_bytes = into.data_ptr(), source.data_ptr(), into.shape[1]
        for offset in range(0, self.chunks * chunk_bytes, chunk_bytes):
            ctypes.memmove(into_at + offset, source_at + offset, chunk_bytes)

    def close(self) -> None:
        """End the worker and unmap the region."""
        del self.rows
        self._worker.shutdown()


def copies(chunks: int, chunk_bytes: int, rounds: int) -> Iterator[Case]:
    """Measure stores and loads.

    The blocks lie in order, as in a fresh KV cache, or scattered, as in an old one.
    """
    rig = CopyRig(chunks, chunk_bytes)
    in_order = list(range(rig.num_blocks))
    scattered = random.Random(1).sample(in_order, rig.num_blocks)
    try:
        for store in (True, False):
            for label, blocks in (("in order", in_order), ("scattered", scattered)):
                yield in_turns(
                    f"cpu {'store' if store else 'load'}, {chunks} x {size(chunk_bytes)}, {label}",
                    rounds,
                    Contender(step=partial(rig.transfer, blocks, store=store)),
                    Contender(step=partial(rig.memcpy, store=store)),
                    moved_bytes=chunks * chunk_bytes,
                )
    finally:
        rig.close()
