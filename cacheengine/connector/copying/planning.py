"""Which bytes a transfer moves: vLLM's specs turned into runs of pages.

Pure arithmetic on block numbers, shared by both directions and testable
without tensors. Source of the rules: ``GPULoadStoreSpec`` of vLLM 0.32
(``v1/kv_offload/base.py``) and ``CPUOffloadingWorker.transfer_async``.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PageRuns = npt.NDArray[np.int64]
"""``[4, runs]``: runs of pages that lie side by side on both sides of a copy.

The rows are blocks, slots, pages, lengths: run i covers ``lengths[i]`` GPU
blocks from ``blocks[i]`` on, and the same number of pages of chunk row
``slots[i]`` from page ``pages[i]`` on. It never leaves its chunk row.
"""


def single_pages(runs: PageRuns) -> PageRuns:
    """Return the same pages, each a run of its own."""
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
    """Pair GPU blocks with pages of chunk rows and merge neighbours.

    ``block_ids`` are logically consecutive blocks of one request, the first
    being block ``first_block_index`` of it: where that is not a multiple of
    ``blocks_per_chunk`` the transfer starts inside its first chunk, and it may
    end inside its last one.

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
