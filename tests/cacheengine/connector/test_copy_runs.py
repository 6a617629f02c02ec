"""Copies by address: the right bytes, and never one outside of either tensor."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheengine.connector.copy_worker import (
    CopyCall,
    LayerMemory,
    PagedMemory,
    PageRuns,
    RunCopier,
    copy_one_by_one,
    make_copy_call,
)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    # Importing torch and numba warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

NUM_BLOCKS = 12
NUM_CHUNKS = 5
PAGES = 4
PAGE_BYTES = 24
MARGIN = 64
GUARD = 77


@pytest.fixture(scope="module", params=["compiled", "one by one"])
def copy_call(request: pytest.FixtureRequest) -> CopyCall:
    if request.param == "one by one":
        return copy_one_by_one
    pytest.importorskip("numba")
    made = make_copy_call()
    assert made is not copy_one_by_one
    return made


class Guarded:
    """A tensor of random bytes between margins that nobody may touch."""

    def __init__(self, *shape: int, row_stride: int) -> None:
        self.memory = torch.full((2 * MARGIN + shape[0] * row_stride,), GUARD, dtype=torch.int8)
        strides = [1, shape[-1]][: len(shape) - 1][::-1]
        self.tensor = self.memory.as_strided(shape, [row_stride, *strides], MARGIN)
        self.tensor.copy_(torch.randint(-128, 128, shape).to(torch.int8))
        self._outside = torch.ones_like(self.memory, dtype=torch.bool)
        self._outside.as_strided(shape, [row_stride, *strides], MARGIN).fill_(False)

    def check(self) -> None:
        assert bool((self.memory[self._outside] == GUARD).all())


class Rig:
    """Two layers of KV cache, one with its blocks side by side, one padded; and their pool."""

    def __init__(self, copy_call: CopyCall) -> None:
        self.kv = [
            Guarded(NUM_BLOCKS, PAGE_BYTES, row_stride=PAGE_BYTES + padding) for padding in (0, 8)
        ]
        self.pool = [
            Guarded(NUM_CHUNKS, PAGES, PAGE_BYTES, row_stride=3 * PAGES * PAGE_BYTES)
            for _ in self.kv
        ]
        layers = [
            LayerMemory.of(kv.tensor, pool.tensor)
            for kv, pool in zip(self.kv, self.pool, strict=True)
        ]
        self.copier = RunCopier(layers, copy_call)

    def check(self) -> None:
        for each in (*self.kv, *self.pool):
            each.check()


@st.composite
def page_runs(draw: st.DrawFn) -> PageRuns:
    """Some runs within bounds whose targets do not overlap, on either side."""
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    slots = draw(st.lists(st.integers(0, NUM_CHUNKS - 1), unique=True, max_size=NUM_CHUNKS))
    runs: list[tuple[int, int, int, int]] = []
    free = set(blocks)
    for slot in slots:
        length = draw(st.integers(1, PAGES))
        page = draw(st.integers(0, PAGES - length))
        starts = [b for b in range(NUM_BLOCKS) if free.issuperset(range(b, b + length))]
        if not starts:
            continue
        block = draw(st.sampled_from(starts))
        free -= set(range(block, block + length))
        runs.append((block, slot, page, length))
    return np.array(runs, dtype=np.int64).reshape(-1, 4).T


@given(runs=page_runs(), store=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_every_page_arrives_and_nothing_else_moves(
    copy_call: CopyCall, runs: PageRuns, store: bool
) -> None:
    rig = Rig(copy_call)
    sources, targets = (rig.kv, rig.pool) if store else (rig.pool, rig.kv)
    expected = [(s.tensor.clone(), t.tensor.clone()) for s, t in zip(sources, targets, strict=True)]
    for source, target in expected:
        for block, slot, page, length in runs.T.tolist():
            for i in range(length):
                if store:
                    target[slot, page + i] = source[block + i]
                else:
                    target[block + i] = source[slot, page + i]
    assert rig.copier.copy(runs, store=store) == 2 * PAGE_BYTES * runs[3].sum()
    for source_is, target_is, (source, target) in zip(sources, targets, expected, strict=True):
        assert torch.equal(source_is.tensor, source)
        assert torch.equal(target_is.tensor, target)
    rig.check()


@pytest.mark.parametrize(
    "bad",
    [
        (-1, 0, 0, 1),
        (NUM_BLOCKS, 0, 0, 1),
        (NUM_BLOCKS - 1, 0, 0, 2),
        (0, -1, 0, 1),
        (0, NUM_CHUNKS, 0, 1),
        (0, 0, -1, 1),
        (0, 0, PAGES - 1, 2),
        (0, 0, 0, -1),
        (2**62, 0, 0, 1),
    ],
)
@pytest.mark.parametrize("store", [True, False])
def test_a_run_out_of_bounds_moves_nothing(
    copy_call: CopyCall, bad: tuple[int, int, int, int], store: bool
) -> None:
    rig = Rig(copy_call)
    before = [each.memory.clone() for each in (*rig.kv, *rig.pool)]
    good = (1, 1, 1, 1)
    runs = np.array([good, bad]).T
    with pytest.raises(IndexError, match="are not in"):
        rig.copier.copy(runs, store=store)
    for each, was in zip((*rig.kv, *rig.pool), before, strict=True):
        assert torch.equal(each.memory, was)


def test_memory_of_another_form_is_refused() -> None:
    pages = torch.zeros((4, 3, 8), dtype=torch.int8)
    with pytest.raises(ValueError, match="not contiguous"):
        PagedMemory.of(pages.transpose(1, 2))
    with pytest.raises(ValueError, match="not contiguous"):
        PagedMemory.of(pages.to(torch.int16))
    with pytest.raises(ValueError, match="overlap"):
        PagedMemory.of(pages.as_strided((4, 3, 8), (8, 8, 1)))
    with pytest.raises(ValueError, match="have 8 bytes, the pool's 9"):
        LayerMemory.of(pages[0], torch.zeros((4, 3, 9), dtype=torch.int8))


def test_without_numba_copies_are_right_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert make_copy_call() is copy_one_by_one
    assert "numba cannot be imported" in caplog.text


def test_a_compiler_that_is_switched_off_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert make_copy_call() is copy_one_by_one
    assert "numba cannot compile them" in caplog.text


def test_the_interpreter_is_free_while_bytes_move() -> None:
    """Another thread sees a copy half done: with the lock held, it could not."""
    pytest.importorskip("numba")
    copy_call = make_copy_call()
    source = np.ones(1 << 28, dtype=np.int8)
    target = np.zeros_like(source)
    run_bytes = source.nbytes // 8
    starts = np.arange(8) * run_bytes
    was_half_done, tries = False, 0
    # More than once only where the machine is too busy to run both at once.
    while not was_half_done and tries < 100:
        target[:] = 0
        thread = threading.Thread(
            target=copy_call,
            args=(target.ctypes.data + starts, source.ctypes.data + starts, np.full(8, run_bytes)),
        )
        thread.start()
        while thread.is_alive():
            was_half_done |= bool(target[0]) and not target[-1]
        assert bool((target == 1).all())
        tries += 1
    assert was_half_done
