"""Copies of many runs of bytes at once, by address.

A transfer moves a run of pages for every layer, chunk and gap between blocks.
All of them go into one call that holds no interpreter lock and starts no
threads: torch would start its own beside those of the model, and a call from
Python for each run takes and gives the lock as often.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cacheengine.connector.copying.planning import PageRuns, single_pages

logger = logging.getLogger("vllm.warmroute")

Integers = npt.NDArray[np.int64]
CopyCall = Callable[[Integers, Integers, Integers], None]
"""Copies ``lengths[i]`` bytes from address ``sources[i]`` to ``targets[i]``, for every i."""

_WORD: Final = np.dtype(np.int64)


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
        """Describe an int8 tensor ``[rows, pages, page_bytes]``; rows may lie apart.

        Raises ValueError unless the pages of a row lie side by side.
        """
        rows, pages, page_bytes = tensor.shape
        row_stride, page_stride, byte_stride = tensor.stride()
        if byte_stride != 1 or (pages > 1 and page_stride != page_bytes) or tensor.itemsize != 1:
            raise ValueError(
                f"no pages of bytes side by side: {tuple(tensor.shape)}, {tensor.stride()}"
            )
        if rows > 1 and row_stride < pages * page_bytes:
            raise ValueError(f"the rows overlap: {tuple(tensor.shape)}, {tensor.stride()}")
        return cls(tensor.data_ptr(), rows, pages, row_stride, page_bytes)

    def addresses(self, rows: Integers, pages: Integers, lengths: Integers) -> Integers:
        """Return where runs of pages begin. Raises IndexError for one that leaves its row."""
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
class Layer:
    """The two places of one KV cache tensor: vLLM's blocks and the pool's chunk rows."""

    blocks: PagedMemory
    """One row of all blocks, or a row for each block where they lie apart."""
    chunks: PagedMemory

    @classmethod
    def of(cls, kv: Any, pool: Any) -> "Layer":
        """Pair int8 ``[num_blocks, page_bytes]`` with ``[num_chunks, pages, page_bytes]``."""
        num_blocks, page_bytes = kv.shape
        lie_apart = num_blocks > 1 and kv.stride(0) != page_bytes
        blocks = PagedMemory.of(kv.unsqueeze(1) if lie_apart else kv.unsqueeze(0))
        chunks = PagedMemory.of(pool)
        if chunks.page_bytes != blocks.page_bytes:
            raise ValueError(f"pages of {blocks.page_bytes} and of {chunks.page_bytes} bytes")
        return cls(blocks, chunks)


def addresses_of(layers: Sequence[Layer], runs: PageRuns) -> tuple[Integers, Integers, Integers]:
    """Return where each layer's runs are in vLLM's blocks and in the pool, and their bytes.

    A layer after the other. Raises IndexError for a run that leaves its row.
    """
    split: PageRuns | None = None
    in_kv, in_pool, sizes = [], [], []
    for layer in layers:
        if layer.blocks.rows == 1:
            blocks, slots, pages, counts = runs
            kv = layer.blocks.addresses(np.zeros_like(blocks), blocks, counts)
        else:
            split = single_pages(runs) if split is None else split
            blocks, slots, pages, counts = split
            kv = layer.blocks.addresses(blocks, np.zeros_like(blocks), counts)
        in_kv.append(kv)
        in_pool.append(layer.chunks.addresses(slots, pages, counts))
        sizes.append(counts * layer.blocks.page_bytes)
    return np.concatenate(in_kv), np.concatenate(in_pool), np.concatenate(sizes)


class RunCopier:
    """Copies runs of pages of every layer, to the pool or from it."""

    def __init__(self, layers: list[Layer], copy: CopyCall) -> None:
        self._layers = layers
        self._copy = copy

    def copy(self, runs: PageRuns, *, store: bool) -> int:
        """Copy and return the bytes. Raises IndexError, having copied nothing, for a bad run."""
        kv_side, pool_side, sizes = addresses_of(self._layers, runs)
        if store:
            self._copy(pool_side, kv_side, sizes)
        else:
            self._copy(kv_side, pool_side, sizes)
        return int(sizes.sum())


def make_copy_call() -> CopyCall:
    """Return the fastest way to copy there is; compiling it takes half a second.

    Without numba (which vLLM brings), or where that cannot compile, each run
    is a call of its own.
    """
    try:
        import numba  # noqa: PLC0415  (half a second, and not everywhere)
    except ImportError as error:
        logger.warning("KV copies are slower without numba: %s", error)
        return copy_one_by_one
    try:
        compiled = _compiled(numba)
        _try_out(compiled)
    except (numba.errors.NumbaError, RuntimeError, TypeError, OSError) as error:
        logger.warning("KV copies are slower, they cannot be compiled: %s", error)
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
    memory = np.arange(4, dtype=_WORD)
    begin = memory.ctypes.data
    call(*(np.array([number], dtype=_WORD) for number in (begin, begin + 16, 16)))
    if memory.tolist() != [2, 3, 2, 3]:
        raise RuntimeError(f"16 bytes came out as {memory.tolist()}")


def copy_one_by_one(targets: Integers, sources: Integers, lengths: Integers) -> None:
    """Copy by one call of the C library for each run."""
    for target, source, length in zip(
        targets.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)
