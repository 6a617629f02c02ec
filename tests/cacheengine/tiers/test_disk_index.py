"""The disk tier's index: it keeps the order, replaces reading the seals, and never lies."""

import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys
from tests.cacheengine.tiers.disk_chunks import (
    FINGERPRINT,
    ITEM_BYTES,
    bytes_under,
    get,
    get_all,
    leave_unsaved,
    open_disk,
    overwrite,
    place_of,
    put,
    put_all,
)
from tests.stored_chunks import stored_chunks

ORDER = keys(3, 1, 4, 5, 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with five chunks and their index."""
    tier = open_disk(tmp_path)
    tier.scan()
    assert {*put_all(tier, sorted(ORDER))} == {PutOutcome.STORED}
    tier.save(ORDER, is_final=True)
    tier.close()
    return tmp_path


@pytest.fixture
def opened(root: Path) -> Iterator[DiskTier]:
    tier = open_disk(root)
    yield tier
    tier.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets that are read from files of slots."""
    offsets: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".kv":
            offsets.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets


def test_the_index_keeps_the_order_and_replaces_reading_seals(
    opened: DiskTier, reads: list[int]
) -> None:
    reads.clear()  # what the probe of the directory has read
    assert opened.scan() == ORDER
    assert reads == []
    assert opened.used_bytes == len(ORDER) * ITEM_BYTES
    assert get_all(opened, ORDER) == [GetOutcome.OK] * len(ORDER)


def test_an_index_is_exact_only_once(opened: DiskTier, root: Path, reads: list[int]) -> None:
    """The next owner writes; what it has written is not in the index."""
    opened.scan()
    put(opened, key(6))
    opened.delete(keys(3))
    put(opened, key(7))  # into the slot of the removed one
    leave_unsaved(opened)
    reads.clear()
    again = open_disk(root)
    # Chunks that the index does not name were written later. They come in the order of their slots.
    assert again.scan() in ([*ORDER[1:], *keys(6, 7)], [*ORDER[1:], *keys(7, 6)])
    assert reads
    assert get_all(again, [*ORDER[1:], *keys(6, 7)]) == [GetOutcome.OK] * 6
    again.close()


def test_an_index_that_was_cut_off_or_damaged_anywhere_costs_the_order_only(root: Path) -> None:
    index = root / FINGERPRINT / ".index"
    whole = index.read_bytes()
    generator = random.Random(1)
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    for _ in range(40):
        flipped = bytearray(whole)
        flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        index.write_bytes(content)
        tier = open_disk(root)
        assert {*tier.scan()} == {*ORDER}
        assert tier.used_bytes == len(ORDER) * ITEM_BYTES
        leave_unsaved(tier)


def test_without_an_index_chunks_are_in_the_order_of_their_slots(root: Path) -> None:
    (root / FINGERPRINT / ".index").unlink()
    tier = open_disk(root)
    assert tier.scan() == sorted(ORDER)
    tier.close()


def test_an_index_written_while_chunks_are_written_keeps_the_order(root: Path) -> None:
    tier = open_disk(root)
    tier.scan()
    put(tier, key(6))
    tier.save(ORDER, is_final=False)
    leave_unsaved(tier)
    again = open_disk(root)
    assert again.scan() == [*ORDER, key(6)]
    again.close()


def test_a_chunk_that_the_last_index_misses_is_gone(root: Path) -> None:
    """It was cleared, and its deletion was still queued at the end."""
    tier = open_disk(root)
    tier.scan()
    tier.save(ORDER[:-1], is_final=True)
    tier.close()
    again = open_disk(root)
    assert again.scan() == ORDER[:-1]
    assert again.used_bytes == 4 * ITEM_BYTES
    again.close()


def test_removed_chunks_do_not_come_back_after_an_end(root: Path) -> None:
    tier = open_disk(root)
    tier.scan()
    tier.delete(ORDER[:2])
    tier.close()  # without an index: a read or write was still under way
    assert stored_chunks(root).keys() == {*ORDER[2:]}
    again = open_disk(root)
    assert {*again.scan()} == {*ORDER[2:]}
    assert again.used_bytes == bytes_under(root) == 3 * ITEM_BYTES
    again.close()


def test_of_two_slots_with_a_key_the_one_that_the_index_does_not_name_is_newer(
    root: Path,
) -> None:
    tier = open_disk(root)
    tier.scan()
    tier.save(ORDER, is_final=False)
    first = place_of(tier, key(1))
    put(tier, key(1))
    assert place_of(tier, key(1)) != first
    overwrite(first, 0, b"x" * 100)  # another put into the free slot began, and was killed
    leave_unsaved(tier)
    again = open_disk(root)
    assert again.scan() == ORDER
    assert get_all(again, ORDER) == [GetOutcome.OK] * len(ORDER)
    assert again.used_bytes == bytes_under(root) == len(ORDER) * ITEM_BYTES
    again.close()


def test_an_index_that_names_slots_of_files_that_are_gone(root: Path) -> None:
    shutil.copy(root / FINGERPRINT / ".index", root / "index")
    for size in (None, 2 * ITEM_BYTES + 100):
        (file,) = (root / FINGERPRINT).glob("*.kv")
        if size is None:
            file.rename(root / "away")
        else:
            shutil.copy(root / "away", file)
            os.truncate(file, size)
        shutil.copy(root / "index", root / FINGERPRINT / ".index")
        tier = open_disk(root)
        found = tier.scan()
        assert len(found) == (0 if size is None else 3)
        assert tier.used_bytes >= bytes_under(root / FINGERPRINT)
        outcomes = [get(tier, chunk) for chunk in found]
        assert outcomes.count(GetOutcome.OK) == (0 if size is None else 2)
        assert put(tier, key(9)) is PutOutcome.STORED
        leave_unsaved(tier)


def test_the_index_of_another_layout_is_not_believed(root: Path) -> None:
    other = root / ("e" * 32)
    shutil.copytree(root / FINGERPRINT, other)
    tier = open_disk(root, fingerprint="e" * 32)
    assert tier.scan() == []
    tier.close()


def test_a_directory_taken_by_another_keeps_its_index(root: Path) -> None:
    tier = open_disk(root)
    tier.scan()
    shutil.rmtree(root / FINGERPRINT)
    thief = open_disk(root)
    thief.scan()
    put(thief, key(1))
    tier.save(ORDER, is_final=True)
    assert not (root / FINGERPRINT / ".index").exists()
    thief.close()
    tier.close()


def test_the_order_is_kept_over_all_paths(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    many = keys(*range(40))
    tier = open_disk(*roots)
    tier.scan()
    put_all(tier, many)
    random.Random(1).shuffle(many)
    for path in range(tier.paths):
        tier.save(many, path, is_final=True)
    tier.close()
    again = open_disk(*roots)
    assert again.scan() == many
    again.close()


def test_a_hundred_thousand_slots_are_read_in_portions(tmp_path: Path) -> None:
    """As many seals as there are slots, by several threads; here few enough for a test."""
    tier = open_disk(tmp_path, chunks=3000)
    tier.scan()
    many = keys(*range(2500))
    for start in range(0, 2500, 100):
        put_all(tier, many[start : start + 100])
    leave_unsaved(tier)
    again = open_disk(tmp_path, chunks=3000)
    assert again.scan() == many
    again.close()


def test_layouts_that_are_no_longer_served_leave_by_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was not used for longest first."""
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 20 * ITEM_BYTES)
    for layout, order in (("a", keys(*range(200))), ("b", keys(*range(200, 400)))):
        theirs = open_disk(tmp_path, fingerprint=layout * 32)
        theirs.scan()
        for start in range(0, 200, 20):
            put_all(theirs, order[start : start + 20])
        theirs.save(order, is_final=True)
        theirs.close()
    ours = open_disk(tmp_path, chunks=400)
    ours.scan()
    assert len(_left(tmp_path, "a")) == 200
    with caplog.at_level(logging.INFO):
        for number in range(1000, 1100):
            assert put(ours, key(number)) is PutOutcome.STORED
            assert bytes_under(tmp_path) <= ours.capacity_bytes
    assert len(caplog.messages) == 100 / 20
    assert 100 - 20 <= len(_left(tmp_path, "a")) <= 100
    assert len(_left(tmp_path, "b")) == 200
    ours.close()
    # What is left of a layout is served again.
    left = _left(tmp_path, "a")
    again = open_disk(tmp_path, fingerprint="a" * 32)
    assert {*again.scan()} == left
    assert get_all(again, [*left]) == [GetOutcome.OK] * len(left)
    again.close()


def _left(root: Path, layout: str) -> set[bytes]:
    return {*stored_chunks(root / (layout * 32))}
