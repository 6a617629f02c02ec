"""Fewer and larger copies for vLLM's own copy worker on a GPU.

It asks the driver for one copy per block and layer, 1,280 for a chunk of 16 blocks and 80
layers, each of which costs about a microsecond. Blocks side by side on both sides go in one.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler

from cacheengine.connector.copying.copy_runs import Integers, Layer, addresses_of
from cacheengine.connector.copying.planning import plan_runs

Blocks = npt.NDArray[np.int32]


def join_copies(worker: CPUOffloadingWorker) -> None:
    """Have a worker ask for one copy for each run of blocks, in both directions.

    Not where it copies by a kernel of its own, which splits what it copies anyway.
    """
    for handler in vars(worker).values():
        if not isinstance(handler, SingleDirectionOffloadingHandler):
            continue
        if handler._swap_blocks_batch is ops.swap_blocks_batch:
            handler._fill_group_ops = JoinedCopies(handler).fill


class JoinedCopies:
    """What one direction of a worker copies, with as few descriptors as there are runs.

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
    ) -> list[Layer] | None:
        """Return the layers of a group; None where vLLM leaves a part of each page out."""
        if any(ref.page_size_bytes != kv[ref.tensor_idx].shape[1] for ref in refs):
            return None
        pages = (-1, self._blocks_per_chunk)
        return [
            Layer.of(kv[each], pool[each].view(*pages, kv[each].shape[1]))
            for each in (ref.tensor_idx for ref in refs)
        ]

    def fill(  # noqa: PLR0917  (vLLM calls it so)
        self,
        g_idx: int,
        group_src: Blocks,
        group_dst: Blocks,
        group_size: int,
        src_skip_count: int,
        dst_skip_count: int,
        all_src: Integers,
        all_dst: Integers,
        all_sizes: Integers,
        op_idx: int,
    ) -> tuple[int, int]:
        """Fill in a group's descriptors from ``op_idx`` on.

        Returns the index after them, and the bytes they copy. In place of vLLM's
        ``_fill_direct_ops``, with its arguments; it has room for a descriptor per page.
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
        # Addresses have the same bits in vLLM's buffers, whose type differs by platform.
        all_src.view(np.int64)[op_idx:end] = kv if self._stores else chunks
        all_dst.view(np.int64)[op_idx:end] = chunks if self._stores else kv
        all_sizes.view(np.int64)[op_idx:end] = sizes
        return end, int(sizes.sum())
