"""Which pages a transfer moves, against a page-by-page reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheengine.connector.copy_worker import PageRuns, plan_runs


def pairs_of(runs: PageRuns) -> list[tuple[int, int, int]]:
    """Spell the runs out: (block, slot, page) for every page."""
    return [
        (block + i, slot, page + i)
        for block, slot, page, length in runs.T.tolist()
        for i in range(length)
    ]


@given(
    blocks=st.lists(st.integers(1, 40), min_size=1, max_size=30, unique=True),
    first=st.integers(0, 50),
    blocks_per_chunk=st.integers(1, 5),
    data=st.data(),
)
def test_every_block_meets_its_page(
    blocks: list[int], first: int, blocks_per_chunk: int, data: st.DataObject
) -> None:
    chunks = (first % blocks_per_chunk + len(blocks) - 1) // blocks_per_chunk + 1
    slots = data.draw(
        st.lists(st.integers(0, 60), min_size=chunks, max_size=chunks, unique=True), label="slots"
    )
    expected = [
        (block, slots[position // blocks_per_chunk], position % blocks_per_chunk)
        for position, block in enumerate(blocks, start=first % blocks_per_chunk)
    ]
    runs = plan_runs(blocks, slots, first, blocks_per_chunk)
    assert pairs_of(runs) == expected
    assert runs[3].sum() == len(blocks)


def test_neighbours_are_one_run_within_a_chunk() -> None:
    runs = plan_runs([7, 8, 9, 10], [3, 4], 0, 2)
    assert runs.tolist() == [[7, 9], [3, 4], [0, 0], [2, 2]]


def test_a_transfer_may_start_and_end_inside_a_chunk() -> None:
    runs = plan_runs([5, 9, 10], [1, 2], 3, 4)
    assert pairs_of(runs) == [(5, 1, 3), (9, 2, 0), (10, 2, 1)]


def test_nothing_to_move() -> None:
    assert plan_runs([], [], 0, 2).tolist() == [[], [], [], []]


@pytest.mark.parametrize("slots", [[1], [1, 2, 3]])
def test_rows_must_cover_the_blocks(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"3 blocks from block 1 on lie in 2 chunks of 2"):
        plan_runs([4, 5, 6], slots, 1, 2)
