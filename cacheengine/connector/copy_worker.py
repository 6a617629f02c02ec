"""Copies of KV between vLLM's cache and the pool's chunk rows, on the CPU and on a GPU.

vLLM has a worker for GPUs, whose copies are joined here, and none for the CPU platform.
"""

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler

from cacheengine.connector.pool_region import PoolRegion

logger = logging.getLogger("vllm.warmroute")

BlockIds = npt.NDArray[np.int32]
Integers = npt.NDArray[np.int64]
CopyCall = Callable[[Integers, Integers, Integers], None]
"""Copies ``lengths[i]`` bytes from address ``sources[i]`` to ``targets[i]``, for every i.

Its arguments are ``(targets, sources, lengths)``.
"""
PageRuns = npt.NDArray[np.int64]
"""``[4, runs]``: runs of pages that are adjacent on both sides of a copy.

The rows are blocks, slots, pages, lengths: run i covers ``lengths[i]`` GPU blocks from
``blocks[i]`` on, and the same number of pages of chunk row ``slots[i]`` from page ``pages[i]`` on.
It never leaves its chunk row.
"""


def single_pages(runs: PageRuns) -> PageRuns:
    """Return the same pages with one run per page."""
    blocks, slots, pages, lengths = np.repeat(runs, runs[3], axis=1)
    first_of_run = np.repeat(np.cumsum(runs[3]) - runs[3], runs[3])
    offsets = np.arange(len(lengths)) - first_of_run
    return np.stack([blocks + offsets, slots, pages + offsets, np.ones_like(lengths)])


def plan_runs(
    block_ids: npt.NDArray[np.int32] | Sequence[int],
    slots: npt.NDArray[np.int32] | Sequence[int],
    first_block_index: int,
    blocks_per_chunk: int,
) -> PageRuns:
    """Pair GPU blocks with pages of chunk rows and merge adjacent ones.

    ``block_ids`` are logically consecutive blocks of one request, the first being block
    ``first_block_index`` of it: where that is not a multiple of ``blocks_per_chunk`` the transfer
    starts inside its first chunk, and it may end inside its last one. These are the rules of vLLM
    0.32 (``GPULoadStoreSpec``, ``CPUOffloadingWorker.transfer_async``).

    Raises ValueError when the chunk rows do not cover exactly the blocks.
    """
    blocks = np.asarray(block_ids, dtype=np.int64)
    rows = np.asarray(slots, dtype=np.int64)
    positions = np.arange(len(blocks)) + first_block_index % blocks_per_chunk
    chunks = positions // blocks_per_chunk
    covered = int(chunks[-1]) + 1 if len(blocks) else 0
    if covered != len(rows):
        raise ValueError(
            f"{len(blocks)} blocks from block {first_block_index} on lie in {covered} chunks "
            f"of {blocks_per_chunk}, but {len(rows)} chunk rows were given"
        )
    if not len(blocks):
        return np.empty((4, 0), np.int64)
    breaks = (np.diff(blocks) != 1) | (np.diff(chunks) != 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((starts, [len(blocks)])))
    pages = positions[starts] % blocks_per_chunk
    return np.stack([blocks[starts], rows[chunks[starts]], pages, lengths])


@dataclass(frozen=True)
class PagedMemory:
    """Rows of pages in memory that another object keeps alive.

    Page p of row r is at ``address + r * row_stride + p * page_bytes``.
    """

    address: int
    rows: int
    pages_per_row: int
    row_stride: int
    page_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> "PagedMemory":
        """Describe an int8 tensor ``[rows, pages, page_bytes]``; there may be gaps between rows.

        Raises ValueError unless the pages of a row are contiguous.
        """
        rows, pages, page_bytes = tensor.shape
        row_stride, page_stride, byte_stride = tensor.stride()
        if byte_stride != 1 or (pages > 1 and page_stride != page_bytes) or tensor.itemsize != 1:
            raise ValueError(
                f"pages are not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        if rows > 1 and row_stride < pages * page_bytes:
            raise ValueError(f"rows overlap: {tuple(tensor.shape)}, strides {tensor.stride()}")
        return cls(tensor.data_ptr(), rows, pages, row_stride, page_bytes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """All but the address."""
        return self.rows, self.pages_per_row, self.row_stride, self.page_bytes

    def addresses(self, rows: Integers, pages: Integers, lengths: Integers) -> Integers:
        """Return the addresses of runs of pages; raise IndexError if one leaves its row."""
        is_inside = (
            (rows >= 0)
            & (rows < self.rows)
            & (pages >= 0)
            & (lengths >= 0)
            & (pages + lengths <= self.pages_per_row)
        )
        if not is_inside.all():
            bad = int(np.flatnonzero(~is_inside)[0])
            raise IndexError(
                f"{lengths[bad]} pages from page {pages[bad]} of row {rows[bad]} on "
                f"are not in {self.rows} rows of {self.pages_per_row} pages"
            )
        found: Integers = self.address + rows * self.row_stride + pages * self.page_bytes
        return found


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer's KV: vLLM's blocks and the pool's chunk rows."""

    blocks: PagedMemory
    """One row of all blocks, or one row per block if there are gaps between blocks."""
    chunks: PagedMemory

    @classmethod
    def of(cls, kv: Any, pool: Any) -> "LayerMemory":
        """Pair int8 ``[num_blocks, page_bytes]`` with ``[num_chunks, pages, page_bytes]``."""
        num_blocks, page_bytes = kv.shape
        lie_apart = num_blocks > 1 and kv.stride(0) != page_bytes
        blocks = PagedMemory.of(kv.unsqueeze(1) if lie_apart else kv.unsqueeze(0))
        chunks = PagedMemory.of(pool)
        if chunks.page_bytes != blocks.page_bytes:
            raise ValueError(
                f"vLLM's pages have {blocks.page_bytes} bytes, the pool's {chunks.page_bytes}"
            )
        return cls(blocks, chunks)


def addresses_of(
    layers: Sequence[LayerMemory], runs: PageRuns
) -> tuple[Integers, Integers, Integers]:
    """Return the runs' addresses in vLLM's blocks, those in the pool, and their sizes in bytes.

    Layer by layer. Raises IndexError for a run that leaves its row.
    """
    split: PageRuns | None = None
    in_kv, in_pool, sizes = [], [], []
    # Layers differ by their addresses alone, as a rule: those are planned at once.
    for _, group in groupby(layers, key=lambda each: (each.blocks.shape, each.chunks.shape)):
        alike = list(group)
        layer = alike[0]
        if layer.blocks.rows == 1:
            blocks, slots, pages, counts = runs
            kv = layer.blocks.addresses(np.zeros_like(blocks), blocks, counts)
        else:
            split = single_pages(runs) if split is None else split
            blocks, slots, pages, counts = split
            kv = layer.blocks.addresses(blocks, np.zeros_like(blocks), counts)
        pool = layer.chunks.addresses(slots, pages, counts)
        in_kv.append(_for_each(kv, [each.blocks.address for each in alike]))
        in_pool.append(_for_each(pool, [each.chunks.address for each in alike]))
        sizes.append(np.tile(counts * layer.blocks.page_bytes, len(alike)))
    return np.concatenate(in_kv), np.concatenate(in_pool), np.concatenate(sizes)


def _for_each(of_first: Integers, begins: Sequence[int]) -> Integers:
    """Return the addresses in each of several memories, given those in the first."""
    offsets = np.array(begins, dtype=np.int64) - begins[0]
    found: Integers = np.add.outer(offsets, of_first).ravel()
    return found


class RunCopier:
    """Copies runs of pages of every layer, to the pool or from it.

    One native call copies all: torch would start threads next to the model's, and a Python call
    per run would take the interpreter's lock each time.
    """

    def __init__(self, layers: list[LayerMemory], copy: CopyCall) -> None:
        self._layers = layers
        self._copy = copy

    def copy(self, runs: PageRuns, *, store: bool) -> int:
        """Copy runs, to the pool if ``store``; return the number of bytes.

        Raises IndexError for a run that leaves its row; nothing is copied then.
        """
        kv_side, pool_side, sizes = addresses_of(self._layers, runs)
        if store:
            self._copy(pool_side, kv_side, sizes)
        else:
            self._copy(kv_side, pool_side, sizes)
        return int(sizes.sum())


def make_copy_call() -> CopyCall:
    """Return the fastest available copy function; compiling it takes half a second.

    Without numba (a dependency of vLLM), or if it cannot compile, each run is copied by a call of
    its own.
    """
    try:
        import numba  # noqa: PLC0415  (half a second, and not everywhere)
    except ImportError as error:
        logger.warning("KV copies are slow, because numba cannot be imported: %s", error)
        return copy_one_by_one
    try:
        compiled = _compiled(numba)
        _try_out(compiled)
    except (numba.errors.NumbaError, RuntimeError, TypeError, OSError) as error:
        logger.warning("KV copies are slow, because numba cannot compile them: %s", error)
        return copy_one_by_one
    return compiled


def _compiled(numba: Any) -> CopyCall:
    word, words = numba.types.uintp, numba.types.Array(numba.int64, 1, "C")
    memcpy = numba.types.ExternalFunction("memcpy", word(word, word, word))

    @numba.njit(numba.void(words, words, words), nogil=True)  # type: ignore[untyped-decorator]
    def copy_all(targets: Integers, sources: Integers, lengths: Integers) -> None:
        for i in range(len(targets)):
            memcpy(targets[i], sources[i], lengths[i])

    call: CopyCall = copy_all
    return call


def _try_out(call: CopyCall) -> None:
    memory = np.arange(4, dtype=np.int64)
    begin = memory.ctypes.data
    call(*(np.array([number], dtype=np.int64) for number in (begin, begin + 16, 16)))
    if memory.tolist() != [2, 3, 2, 3]:
        raise RuntimeError(f"a test copy of 16 bytes gave {memory.tolist()}")


def copy_one_by_one(targets: Integers, sources: Integers, lengths: Integers) -> None:
    """Copy with one call of the C library per run."""
    for target, source, length in zip(
        targets.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)


def join_copies(worker: CPUOffloadingWorker) -> None:
    """Make vLLM's worker issue one copy per run of blocks, in both directions.

    vLLM issues one copy per block and layer: 1,280 for a chunk of 16 blocks and 80 layers, each
    about a microsecond. A direction that copies with a kernel of its own is left alone, because
    the kernel splits copies anyway.
    """
    for handler in vars(worker).values():
        if not isinstance(handler, SingleDirectionOffloadingHandler):
            continue
        if handler._swap_blocks_batch is ops.swap_blocks_batch:
            handler._fill_group_ops = JoinedCopies(handler).fill


class JoinedCopies:
    """Fills in the copy descriptors of one direction of vLLM's worker, one per run.

    A run never leaves its chunk row: vLLM registers the rows with the driver in pieces that
    end between rows.
    """

    def __init__(self, handler: SingleDirectionOffloadingHandler) -> None:
        self._stores: Final[bool] = handler.gpu_to_cpu
        self._blocks_per_chunk: Final[int] = max(
            handler.src_blocks_per_chunk, handler.dst_blocks_per_chunk
        )
        self._plain: Final = handler._fill_direct_ops
        kv, pool = handler.src_tensors, handler.dst_tensors
        if not self._stores:
            kv, pool = pool, kv
        self._layers: Final = [
            self._layers_of(refs, kv, pool) for refs in handler.layer_refs_per_group
        ]

    def _layers_of(
        self, refs: Sequence[Any], kv: Sequence[Any], pool: Sequence[Any]
    ) -> list[LayerMemory] | None:
        """Return the layers of a group; None if vLLM copies only a part of each page."""
        if any(ref.page_size_bytes != kv[ref.tensor_idx].shape[1] for ref in refs):
            return None
        pages = (-1, self._blocks_per_chunk)
        return [
            LayerMemory.of(kv[each], pool[each].view(*pages, kv[each].shape[1]))
            for each in (ref.tensor_idx for ref in refs)
        ]

    def fill(  # noqa: PLR0917  (vLLM calls it so)
        self,
        g_idx: int,
        group_src: BlockIds,
        group_dst: BlockIds,
        group_size: int,
        src_skip_count: int,
        dst_skip_count: int,
        all_src: Integers,
        all_dst: Integers,
        all_sizes: Integers,
        op_idx: int,
    ) -> tuple[int, int]:
        """Fill in a group's descriptors from index ``op_idx`` on.

        Returns the index after them and the number of bytes they copy. Replaces vLLM's
        ``_fill_direct_ops`` and has its arguments; the buffers fit one descriptor per page.
        """
        layers = self._layers[g_idx]
        if layers is None:
            given = (group_src, group_dst, group_size, src_skip_count, dst_skip_count)
            done: tuple[int, int] = self._plain(g_idx, *given, all_src, all_dst, all_sizes, op_idx)
            return done
        blocks, rows = (group_src, group_dst) if self._stores else (group_dst, group_src)
        skipped = dst_skip_count if self._stores else src_skip_count
        runs = plan_runs(blocks, rows, skipped, self._blocks_per_chunk)
        kv, chunks, sizes = addresses_of(layers, runs)
        end = op_idx + len(sizes)
        # The integer type of vLLM's buffers differs by platform; the addresses' bits are the same.
        all_src.view(np.int64)[op_idx:end] = kv if self._stores else chunks
        all_dst.view(np.int64)[op_idx:end] = chunks if self._stores else kv
        all_sizes.view(np.int64)[op_idx:end] = sizes
        return end, int(sizes.sum())


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole pages between KV cache tensors and chunk rows on the CPU platform.

    Owns ``region`` from construction on. Jobs run on one thread in the order of submission, so a
    load never overtakes the store of the same row. One thread is enough: it uses the memory's full
    bandwidth, and the model needs the other cores. `submit_store` and `submit_load` only queue a
    job. The caller (vLLM's worker) submits a store after the step that computed its blocks, and
    waits for it before it reuses them.
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
        # Guards _finished and _pending: the copy thread moves a job from one to the other while
        # vLLM's thread polls or waits.
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._finished: list[TransferResult] = []
        layers = map(LayerMemory.of, self._kv_tensors, self._pool_tensors)
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

        ``expedited`` (vLLM 0.33) asks to overtake queued stores. The order is kept here, and the
        caller waits.
        """
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of these jobs is pending; unknown jobs count as done."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """Finish the queued jobs, end the thread and release the region. Idempotent."""
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
        # The spec refuses models with several KV groups when it starts.
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
        except Exception:  # vLLM ends on a failed job; without this thread it would wait for ever
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
