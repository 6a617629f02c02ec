"""The CPU copy worker on real tensors and a real shared region, against vLLM's own planning."""

import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

LAYERS = 3
NUM_BLOCKS = 24
PAGE_BYTES = 1024
BLOCKS_PER_CHUNK = 4
NUM_CHUNKS = 6
ROW_BYTES = LAYERS * PAGE_BYTES * BLOCKS_PER_CHUNK  # already a multiple of the page size


class Rig:
    """KV tensors, a pool, and the worker between them."""

    def __init__(self) -> None:
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )

        from cacheengine.connector.copy_worker import CpuCopyWorker
        from cacheengine.connector.pool_region import PoolRegion

        generator = torch.Generator().manual_seed(7)
        self.kv = [
            torch.randint(-128, 128, (NUM_BLOCKS, PAGE_BYTES), generator=generator).to(torch.int8)
            for _ in range(LAYERS)
        ]
        self.engine_id = f"test-{uuid.uuid4()}"
        self.region = PoolRegion(
            engine_id=self.engine_id,
            num_chunks=NUM_CHUNKS,
            rank=0,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        self.pool = self.region.base_tensor.view(NUM_CHUNKS, ROW_BYTES)
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in self.kv],
            group_data_refs=[[CanonicalKVCacheRef(i, PAGE_BYTES) for i in range(LAYERS)]],
        )
        self.worker = CpuCopyWorker(caches, BLOCKS_PER_CHUNK, self.region)
        self._jobs = 0

    def transfer(self, direction: str, blocks: list[int], slots: list[int], first: int) -> None:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        gpu = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
        cpu = CPULoadStoreSpec(slots)
        self._jobs += 1
        if direction == "store":
            self.worker.submit_store(self._jobs, gpu, cpu)
        else:
            self.worker.submit_load(self._jobs, cpu, gpu)
        self.worker.wait({self._jobs})
        (result,) = self.worker.get_finished()
        assert result.job_id == self._jobs
        assert result.success
        assert result.transfer_size == LAYERS * PAGE_BYTES * len(blocks)

    def close(self) -> None:
        del self.pool
        self.worker.shutdown()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_what_is_loaded_is_what_was_stored(rig: Rig) -> None:
    blocks = [5, 6, 2, 9, 10, 11, 12, 0]
    before = [tensor[blocks].clone() for tensor in rig.kv]
    rig.transfer("store", blocks, [4, 1], 0)
    for tensor in rig.kv:
        tensor.zero_()
    elsewhere = [20, 3, 4, 5, 6, 15, 14, 13]
    rig.transfer("load", elsewhere, [4, 1], 0)
    for tensor, stored in zip(rig.kv, before, strict=True):
        assert torch.equal(tensor[elsewhere], stored)
        others = [b for b in range(NUM_BLOCKS) if b not in elsewhere]
        assert not tensor[others].any()


def test_a_load_that_starts_inside_a_chunk_takes_the_right_pages(rig: Rig) -> None:
    blocks = list(range(8))
    rig.transfer("store", blocks, [0, 5], 0)
    stored = [tensor[:8].clone() for tensor in rig.kv]
    for tensor in rig.kv:
        tensor.zero_()
    # Blocks 3 to 6 of the request: the last page of chunk 0, three of chunk 1.
    rig.transfer("load", [23, 17, 18, 1], [0, 5], 3)
    for tensor, expected in zip(rig.kv, stored, strict=True):
        assert torch.equal(tensor[[23, 17, 18, 1]], expected[3:7])


def test_a_store_leaves_other_rows_alone(rig: Rig) -> None:
    rig.pool.fill_(77)
    rig.transfer("store", [1, 2, 3, 4], [2], 0)
    others = [row for row in range(NUM_CHUNKS) if row != 2]
    assert bool((rig.pool[others] == 77).all())


def test_rows_lie_where_vllms_cuda_worker_puts_them(rig: Rig) -> None:
    """The planning for CUDA is vLLM's: both must address the same bytes."""
    from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

    from cacheengine.connector.copy_worker import plan_runs

    rng = np.random.default_rng(3)
    for _ in range(200):
        count = int(rng.integers(1, 14))
        first = int(rng.integers(0, 9))
        chunks = (first % BLOCKS_PER_CHUNK + count - 1) // BLOCKS_PER_CHUNK + 1
        if chunks > NUM_CHUNKS:
            continue
        slots = rng.permutation(NUM_CHUNKS)[:chunks].astype(np.int32)
        blocks = rng.permutation(NUM_BLOCKS)[:count].astype(np.int32)
        runs = plan_runs(blocks, slots, first, BLOCKS_PER_CHUNK)
        for layer in range(LAYERS):
            view = rig.region._views[layer]
            theirs = np.empty(count, dtype=np.uint64)
            compute_sub_block_ptrs(slots, BLOCKS_PER_CHUNK, theirs, view, first % BLOCKS_PER_CHUNK)
            ours = [
                view[slot].data_ptr() + (page + i) * PAGE_BYTES
                for _, slot, page, length in runs.T.tolist()
                for i in range(length)
            ]
            assert ours == theirs.tolist()


def test_a_copy_that_fails_says_so_and_holds_nobody_up(rig: Rig) -> None:
    """vLLM ends on a failed transfer; waiting for it for ever would hang the replica."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    blocks = list(range(BLOCKS_PER_CHUNK))
    gpu = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    rig.worker.submit_store(1001, gpu, CPULoadStoreSpec([NUM_CHUNKS]))
    rig.worker.wait({1001})
    assert [(result.job_id, result.success) for result in rig.worker.get_finished()] == [
        (1001, False)
    ]
    rig.transfer("store", blocks, [0], 0)


def test_shutdown_leaves_nothing_behind(rig: Rig) -> None:
    path = Path(rig.region.mmap_path)
    assert path.exists()
    rig.region.forget_name()
    assert not path.exists()
