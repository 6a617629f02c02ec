"""The serving engine's side of the comparison: its KV cache, its copy worker, a step of it.

Ours and vLLM's tiering are driven the same way: through vLLM's
`OffloadingManager`, as its scheduler does, and with the same copy worker for
the CPU platform over the same chunk rows (vLLM's own needs a GPU).
"""

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from bench.compare.rounds import Workload
from cacheengine.connector.copying.copy_worker import CpuCopyWorker
from cacheengine.connector.region import PoolRegion

_STEP_S: Final = 0.0005
"""Between two steps of a scheduler that has nothing to compute."""


class KvSide:
    """KV cache tensors ``[blocks, page_bytes]``, one per layer, and the worker that copies them."""

    def __init__(self, workload: Workload) -> None:
        self.engine_id = f"bench-{uuid.uuid4()}"
        self._workload = workload
        blocks = workload.chunks * workload.blocks_per_chunk
        self._tensors = [
            torch.zeros((blocks, workload.page_bytes), dtype=torch.int8)
            for _ in range(workload.layers)
        ]
        self.region = PoolRegion(
            engine_id=self.engine_id,
            num_chunks=workload.pool_chunks,
            rank=0,
            kv_bytes_per_chunk=workload.chunk_bytes,
            cpu_page_size=workload.chunk_bytes,
        )
        page_bytes = workload.page_bytes
        self._worker = CpuCopyWorker(
            CanonicalKVCaches(
                tensors=[CanonicalKVCacheTensor(each, page_bytes) for each in self._tensors],
                group_data_refs=[
                    [CanonicalKVCacheRef(i, page_bytes) for i in range(len(self._tensors))]
                ],
            ),
            workload.blocks_per_chunk,
            self.region,
        )
        self._jobs = 0
        self._digest = b""

    def copy(self, chunk_spec: Any, blocks: Sequence[int], *, store: bool) -> None:
        """Copy these KV cache blocks to chunk rows, or back, and wait for it."""
        gpu_spec = GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[0])
        self._jobs += 1
        if store:
            self._worker.submit_store(self._jobs, gpu_spec, chunk_spec)
        else:
            self._worker.submit_load(self._jobs, chunk_spec, gpu_spec)
        self._worker.wait({self._jobs})
        if not all(result.success for result in self._worker.get_finished()):
            raise RuntimeError("a copy failed")

    def fill(self, number: int) -> None:
        """Have other bytes in it for each number."""
        generator = torch.Generator().manual_seed(number)
        for tensor in self._tensors:
            tensor.random_(-128, 128, generator=generator)
        self._digest = self._current_digest()

    def blank(self) -> None:
        """Overwrite it with zeros."""
        for tensor in self._tensors:
            tensor.zero_()

    def is_intact(self) -> bool:
        """Whether it holds what `fill` wrote."""
        return self._current_digest() == self._digest

    def close(self) -> None:
        """End the worker and release the pool."""
        self._worker.shutdown()

    def _current_digest(self) -> bytes:
        digest = hashlib.blake2b()
        for tensor in self._tensors:
            digest.update(tensor.numpy())
        return digest.digest()


class OffloadingContender:
    """What ours and vLLM's tiering have in common; `includes` and the tiers are their own."""

    def __init__(self, workload: Workload, kv: KvSide, manager: OffloadingManager) -> None:
        self.workload = workload
        self.kv = kv
        self.manager = manager
        self.keys: list[OffloadKey] = []
        self.context = ReqContext(req_id="before the first")
        manager.on_new_request(self.context)

    def begin(self, number: int) -> None:
        """Have a new prompt: fresh keys, fresh bytes in the KV cache."""
        self.kv.fill(number)
        self.keys = [
            make_offload_key(hashlib.sha256(f"{number} {i}".encode()).digest(), 0)
            for i in range(self.workload.chunks)
        ]
        self.ask_anew(f"round {number}")

    def ask_anew(self, name: str) -> None:
        """Be another request of the same prompt: what a lookup found is remembered for each."""
        self.manager.on_request_finished(self.context)
        self.context = ReqContext(req_id=name)
        for i, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, (i + 1) * self.workload.chunk_tokens)
        self.manager.on_new_request(self.context)

    def store(self) -> None:
        """Do as a step that has computed the whole prompt, and the step after it."""
        prepared = self.manager.prepare_store(self.keys, self.context)
        if prepared is None or len(prepared.keys_to_store) != len(self.keys):
            raise RuntimeError("there is no room for the prompt")
        self.kv.copy(prepared.store_spec, self._blocks(), store=True)
        self.manager.complete_store(set(self.keys), self.context)

    def lookup(self) -> int:
        """Ask as the scheduler does, to the first chunk that is not there, and end the step."""
        found = self._hits()
        self._end_step()
        return found

    def load(self) -> None:
        """Look up, and copy what is there."""
        if self._hits() != len(self.keys):
            raise RuntimeError("the prompt is not in the CPU tier")
        spec = self.manager.prepare_load(self.keys, self.context)
        self._end_step()
        self.kv.copy(spec, self._blocks(), store=False)
        self.manager.complete_load(self.keys, self.context)

    def get(self) -> None:
        """Look up, step after step, until all is in the CPU tier."""
        while True:
            results = [self.manager.lookup(key, self.context) for key in self.keys]
            self._end_step()
            if LookupResult.MISS in results:
                raise RuntimeError("a chunk is lost on disk")
            if set(results) == {LookupResult.HIT}:
                return
            time.sleep(_STEP_S)

    def blank(self) -> None:
        """Overwrite the KV cache with zeros."""
        self.kv.blank()

    def is_intact(self) -> bool:
        """Whether the KV cache holds the prompt's bytes."""
        return self.kv.is_intact()

    def close(self) -> None:
        """Release everything."""
        self.manager.shutdown()
        self.kv.close()

    def _hits(self) -> int:
        for number, key in enumerate(self.keys):
            if self.manager.lookup(key, self.context) is not LookupResult.HIT:
                return number
        return len(self.keys)

    def _end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def _blocks(self) -> range:
        return range(self.workload.chunks * self.workload.blocks_per_chunk)
