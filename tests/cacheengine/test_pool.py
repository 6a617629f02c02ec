"""The pool: equal slots over someone's memory."""

import mmap

import pytest

from cacheengine.memory import Pool


def test_slots_do_not_overlap_and_are_not_copies() -> None:
    buffer = bytearray(4 * 8)
    pool = Pool(buffer, 4, 8)
    for slot in range(4):
        pool.view(slot)[:] = bytes([slot]) * 8
    assert bytes(buffer) == b"".join(bytes([slot]) * 8 for slot in range(4))


def test_takes_a_buffer_of_two_dimensions() -> None:
    """As vLLM gives it: [chunk, bytes]."""
    buffer = bytearray(4 * 8)
    shaped = memoryview(buffer).cast("B", (4, 8))
    Pool(shaped, 4, 8).view(3)[:] = b"x" * 8
    assert buffer[24:] == b"x" * 8


@pytest.mark.parametrize("slot", [-1, 4])
def test_refuses_a_slot_that_is_not_there(slot: int) -> None:
    with pytest.raises(IndexError, match="of a pool of 4"):
        Pool.allocate(4, 8).view(slot)


@pytest.mark.parametrize(
    ("buffer", "slots", "problem"),
    [
        (memoryview(b"x" * 32), 4, "read-only"),
        (memoryview(bytearray(31)), 4, "too few"),
        (memoryview(bytearray(31)), 0, "at least one"),
    ],
)
def test_refuses_what_cannot_be_a_pool(buffer: memoryview, slots: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Pool(buffer, slots, 8)


def test_close_lets_the_owner_unmap() -> None:
    """An exported view would make mmap.close raise BufferError."""
    memory = mmap.mmap(-1, 4096)
    pool = Pool(memory, 1, 4096)
    pool.view(0)[:1] = b"x"
    pool.close()
    pool.close()
    memory.close()
