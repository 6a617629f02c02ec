"""What is taken for a hold of the interpreter's lock."""

import mmap
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.decode_cost.gil.__main__ import measure_hold
from bench.decode_cost.gil.chunk_work import chunk_work
from bench.decode_cost.gil.spinner import Reading
from cacheengine import bulk


@pytest.mark.parametrize(
    ("waited_s", "without_core_s", "computed_s", "held_s"),
    [
        (0.010, 0.0, 0.010, 0.010),
        # The holder had no core for most of it.
        (0.010, 0.0, 0.002, 0.002),
        # The spinning thread itself had none: whether the lock was held meanwhile nobody knows.
        (0.010, 0.009, 0.010, 0.001),
    ],
)
def test_a_hold_is_what_others_computed_while_the_lock_was_waited_for(
    waited_s: float, without_core_s: float, computed_s: float, held_s: float
) -> None:
    before = Reading(at_s=1.0, without_core_s=2.0, others_computed_s=3.0)
    later = Reading(
        at_s=1.0 + waited_s,
        without_core_s=2.0 + without_core_s,
        others_computed_s=3.0 + computed_s,
    )
    assert before.held_until_s(later) == pytest.approx(held_s)


def test_what_copies_a_chunk_holds_the_lock_for_less_than_python_itself_does() -> None:
    source, into = (memoryview(mmap.mmap(-1, 64 << 20)) for _ in range(2))

    def as_python_does() -> None:
        into[:] = source

    held = measure_hold("held", as_python_does, rounds=9)
    given_away = measure_hold("given away", lambda: bulk.copy(into, source), rounds=9)
    assert 2 * given_away.longest_hold_ms < held.longest_hold_ms


def test_every_kind_of_work_on_a_chunk_can_be_repeated(tmp_path: Path) -> None:
    if shutil.which("redis-benchmark") is None:
        pytest.skip("needs Redis")
    with ExitStack() as stack:
        work = chunk_work(1 << 20, tmp_path, stack)
        for each in work.values():
            each()
            each()
    assert {"read from disk", "read from Redis, lossless", "copied to a peer, checksum"} <= set(
        work
    )
