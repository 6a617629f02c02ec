"""Joined copies move, byte for byte, what vLLM's own plan for a GPU moves.

Run on tensors in RAM: vLLM's planning is the real one, what it hands to the driver is carried
out here.
"""

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

NUM_BLOCKS = 24
NUM_ROWS = 6
PAGE_BYTES = 16


class Copies(NamedTuple):
    """Descriptors as the driver gets them."""

    sources: list[int]
    targets: list[int]
    sizes: list[int]

    def carry_out(self) -> None:
        for source, target, size in zip(self.sources, self.targets, self.sizes, strict=True):
            ctypes.memmove(target, source, size)


class Direction:
    """One direction of vLLM's worker, without the GPU that its constructor wants to see."""

    def __init__(
        self, *, stores: bool, blocks_per_chunk: int, layers: int, left_out: int, apart: bool
    ) -> None:
        import torch
        from vllm import _custom_ops as ops
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

        def random_bytes(*shape: int) -> Any:
            return torch.randint(-128, 128, shape).to(torch.int8)

        # Layers of one block may be interleaved with other layers', as in packed layouts.
        stride = PAGE_BYTES * (2 if apart else 1)
        whole = [random_bytes(NUM_BLOCKS, stride) for _ in range(layers)]
        self.kv = [each[:, :PAGE_BYTES] for each in whole]
        self.row_bytes = layers * blocks_per_chunk * PAGE_BYTES + 8
        self.pool = random_bytes(NUM_ROWS, self.row_bytes)
        slices = self.pool[:, : layers * blocks_per_chunk * PAGE_BYTES].chunk(layers, dim=1)
        handler = object.__new__(SingleDirectionOffloadingHandler)
        handler.gpu_to_cpu = stores
        handler.src_tensors = self.kv if stores else list(slices)
        handler.dst_tensors = list(slices) if stores else self.kv
        handler.src_blocks_per_chunk = 1 if stores else blocks_per_chunk
        handler.dst_blocks_per_chunk = blocks_per_chunk if stores else 1
        refs = [CanonicalKVCacheRef(each, PAGE_BYTES - left_out) for each in range(layers)]
        handler.layer_refs_per_group = [refs]
        handler._swap_blocks_batch = ops.swap_blocks_batch
        handler._fill_group_ops = handler._fill_direct_ops
        self.handler = handler
        self.stores = stores
        self.blocks_per_chunk = blocks_per_chunk

    def memory(self) -> list[bytes]:
        return [each.numpy().tobytes() for each in (*self.kv, self.pool)]

    def plan(self, blocks: Sequence[int], rows: Sequence[int], skipped: int) -> Copies:
        """Return what `transfer_async` would give to the driver for one group."""
        kv, pool = np.array(blocks, dtype=np.int32), np.array(rows, dtype=np.int32)
        given = (kv, pool) if self.stores else (pool, kv)
        skips = (0, skipped) if self.stores else (skipped, 0)
        room = len(blocks) * len(self.kv)
        buffers = [np.zeros(room, dtype=np.int64) for _ in range(3)]
        count, copied = self.handler._fill_group_ops(0, *given, len(blocks), *skips, *buffers, 0)
        made = Copies(*(each[:count].tolist() for each in buffers))
        assert copied == sum(made.sizes)
        return made

    def join(self) -> None:
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        from cacheengine.connector.copy_worker import join_copies

        worker = object.__new__(CPUOffloadingWorker)
        worker._store_handler = worker._load_handler = self.handler
        join_copies(worker)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """Draw blocks per chunk, blocks with runs among them, rows, and the skip in the first."""
    blocks_per_chunk = draw(st.sampled_from([1, 2, 4]))
    skipped = draw(st.integers(0, blocks_per_chunk - 1))
    count = draw(st.integers(1, min(NUM_BLOCKS, NUM_ROWS * blocks_per_chunk - skipped)))
    order = list(range(NUM_BLOCKS))
    if draw(st.booleans()):
        cut = draw(st.integers(0, NUM_BLOCKS))
        order = order[cut:] + order[:cut]
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    rows = draw(st.permutations(range(NUM_ROWS)))
    needed = -(-(count + skipped) // blocks_per_chunk)
    return blocks_per_chunk, order[:count], list(rows[:needed]), skipped


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    transfer=transfers(),
    stores=st.booleans(),
    layers=st.integers(1, 3),
    left_out=st.sampled_from([0, 0, 4]),
    apart=st.booleans(),
)
def test_what_is_joined_moves_the_same_bytes_to_the_same_places(
    transfer: tuple[int, list[int], list[int], int],
    stores: bool,
    layers: int,
    left_out: int,
    apart: bool,
) -> None:
    blocks_per_chunk, blocks, rows, skipped = transfer
    direction = Direction(
        stores=stores,
        blocks_per_chunk=blocks_per_chunk,
        layers=layers,
        left_out=left_out,
        apart=apart,
    )
    before = [each.clone() for each in (*direction.kv, direction.pool)]
    plain = direction.plan(blocks, rows, skipped)
    plain.carry_out()
    expected = direction.memory()

    for now, then in zip((*direction.kv, direction.pool), before, strict=True):
        now.copy_(then)
    direction.join()
    joined = direction.plan(blocks, rows, skipped)
    joined.carry_out()
    assert direction.memory() == expected
    assert sum(joined.sizes) == sum(plain.sizes)
    assert len(joined.sizes) <= len(plain.sizes)
    assert_within_rows(direction, joined)


def assert_within_rows(direction: Direction, copies: Copies) -> None:
    """Nothing spans two chunk rows, between which vLLM's registrations with the driver end."""
    begin = direction.pool.data_ptr()
    for address, size in zip(
        copies.targets if direction.stores else copies.sources, copies.sizes, strict=True
    ):
        first = (address - begin) // direction.row_bytes
        assert first == (address + size - 1 - begin) // direction.row_bytes


@pytest.mark.parametrize("stores", [True, False])
def test_a_chunk_of_an_80_layer_model_is_80_copies_instead_of_1280(stores: bool) -> None:
    direction = Direction(stores=stores, blocks_per_chunk=16, layers=80, left_out=0, apart=False)
    transfer = (list(range(4, 20)), [3], 0)
    assert len(direction.plan(*transfer).sizes) == 1280
    direction.join()
    assert direction.plan(*transfer).sizes == [16 * PAGE_BYTES] * 80


def test_what_a_kernel_of_vllm_copies_stays_as_it_is() -> None:
    direction = Direction(stores=False, blocks_per_chunk=2, layers=1, left_out=0, apart=False)
    direction.handler._swap_blocks_batch = print
    plain = direction.handler._fill_group_ops
    direction.join()
    assert direction.handler._fill_group_ops == plain
