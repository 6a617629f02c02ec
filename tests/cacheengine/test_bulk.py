"""Large runs of bytes: the same as Python's own ways give, and no lock held for them."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import xxhash

from cacheengine import bulk

SIZES = (0, 1, 65_535, 65_536, 65_537, 3 << 20)


def _bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_checksum_is_that_of_one_call(size: int) -> None:
    assert bulk.checksum(memoryview(_bytes(size))) == xxhash.xxh3_128_digest(_bytes(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "kind",
    [bytes, lambda given: memoryview(bytearray(given)), memoryview],
    ids=["bytes", "writable", "readonly"],
)
def test_a_copy_has_every_byte_and_touches_no_other(
    size: int, kind: Callable[[bytes], bytes | memoryview]
) -> None:
    whole = bytearray(b"\xaa" * (size + 2))
    bulk.copy(memoryview(whole)[1:-1], kind(_bytes(size)))
    assert whole == b"\xaa" + _bytes(size) + b"\xaa"


@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_a_copy_reads_a_part_of_a_buffer_from_where_it_begins(offset: int) -> None:
    source, into = bytearray(_bytes(1 << 20)), bytearray((1 << 20) - offset)
    bulk.copy(memoryview(into), memoryview(source)[offset:])
    assert into == source[offset:]


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_copy_of_another_size_is_refused(size: int, more: int) -> None:
    into = bytearray(size)
    with pytest.raises(ValueError, match="cannot fill"):
        bulk.copy(memoryview(into), bytes(size + more))
    assert into == bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_private_copy_outlives_what_it_was_made_from(size: int) -> None:
    source = bytearray(_bytes(size))
    made = bulk.private_copy(memoryview(source))
    source[:] = bytes(size)
    assert made == _bytes(size)


def test_buffers_can_be_let_go_of_after_a_copy() -> None:
    source, into = bytearray(1 << 20), bytearray(1 << 20)
    bulk.copy(memoryview(into), memoryview(source))
    for each in (source, into):
        each.append(0)  # a BufferError while something still points to it


@pytest.mark.usefixtures("no_forced_switches")
def test_others_run_while_large_objects_are_let_go() -> None:
    seen: set[int] = set()
    parts: list[memoryview | bytes] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(len(parts))
            time.sleep(0)

    other = threading.Thread(target=look)
    other.start()
    try:
        # More than once only where the machine is too busy to run the other at once. With the lock
        # held it would see no length between all of them and none.
        for _ in range(100):
            parts += [bytes(1 << 20) for _ in range(64)]
            bulk.let_go(parts)
            assert not parts
            if len(seen - {0, 64}) > 1:
                break
    finally:
        done.set()
        other.join()
    assert len(seen - {0, 64}) > 1
