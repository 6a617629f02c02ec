"""KV copies between vLLM's cache and the pool on the CPU platform.

vLLM's own copy worker needs a GPU. This one does the same over the same chunk
rows: one thread per worker process, one native call per job, which copies all
runs of pages without the interpreter lock. One thread, not several: it already
moves what memory can, and the model needs the other cores.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from cacheengine.connector.copying.copy_runs import Layer, RunCopier, make_copy_call
from cacheengine.connector.copying.planning import PageRuns, plan_runs
from cacheengine.connector.region import PoolRegion

logger = logging.getLogger(__name__)


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole pages between KV cache tensors and chunk rows, in order.

    Owns ``region`` from construction on. Jobs run one after another on one
    thread, in the order they were submitted: a load never overtakes the store
    of the same row. `submit_store` and `submit_load` only queue; the caller
    (vLLM's worker) submits a store after the step that computed its blocks,
    and waits for it before their reuse.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: PoolRegion
    ) -> None:
        super().__init__()
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._kv_tensors = [_block_rows(cache) for cache in kv_caches.tensors]
        pages_bytes = [cache.page_size_bytes for cache in kv_caches.tensors]
        self._pool_tensors = [
            region.create_next_worker_view(each * blocks_per_chunk).view(-1, blocks_per_chunk, each)
            for each in pages_bytes
        ]
        self._jobs: queue.SimpleQueue[Callable[[], TransferResult] | None] = queue.SimpleQueue()
        # Guards _finished and _pending: the copy thread moves a job from one
        # to the other while vLLM's thread polls or waits.
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._finished: list[TransferResult] = []
        layers = map(Layer.of, self._kv_tensors, self._pool_tensors)
        self._copier = RunCopier(list(layers), make_copy_call())
        self._thread = threading.Thread(target=self._run, name="kv-copy", daemon=True)
        self._thread.start()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue a copy from KV cache blocks to chunk rows."""
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Queue a copy from chunk rows to KV cache blocks.

        ``expedited`` (vLLM 0.33) asks to overtake queued stores; here order is
        kept, and the caller waits.
        """
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of these jobs is pending; unknown ones are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Finish what is queued, end the thread, release the region. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            self._kv_tensors.clear()
            self._pool_tensors.clear()
            self._region.cleanup()

    def _submit(
        self, job_id: int, gpu_spec: GPULoadStoreSpec, chunk_spec: LoadStoreSpec, *, store: bool
    ) -> bool:
        assert isinstance(chunk_spec, BlockIDsLoadStoreSpec)
        # The spec refuses models with several KV groups at start.
        assert len(gpu_spec.group_sizes) == 1
        runs = plan_runs(
            gpu_spec.block_ids,
            chunk_spec.block_ids,
            gpu_spec.block_indices[0],
            self._blocks_per_chunk,
        )
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put(lambda: self._copy(job_id, runs, store=store))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = job()
            with self._changed:
                self._pending.discard(result.job_id)
                self._finished.append(result)
                self._changed.notify_all()

    def _copy(self, job_id: int, runs: PageRuns, *, store: bool) -> TransferResult:
        start_s = time.perf_counter()
        try:
            copied_bytes = self._copier.copy(runs, store=store)
        except Exception:  # without this thread vLLM would wait for ever; told, it ends
            logger.exception("a KV copy failed")
            return TransferResult(job_id=job_id, success=False)
        return TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=copied_bytes,
            transfer_time=time.perf_counter() - start_s,
        )


def _block_rows(cache: Any) -> torch.Tensor:
    """Return a KV cache as int8 ``[num_blocks, page_bytes]`` without copying."""
    tensor: torch.Tensor = cache.tensor
    if tensor.dtype != torch.int8 or tensor.ndim != 2:
        tensor = tensor.view(torch.int8).view(-1, cache.page_size_bytes)
    return tensor
