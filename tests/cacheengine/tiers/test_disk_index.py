"""The disk tier's index: it keeps the order, replaces a listing, and never says what is not so."""

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
    open_disk,
    put,
)

ORDER = keys(3, 1, 4, 5, 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with five chunks and their index."""
    tier = open_disk(tmp_path)
    tier.scan()
    for chunk in sorted(ORDER):
        assert put(tier, chunk) is PutOutcome.STORED
    tier.save(ORDER, is_final=True)
    tier.close()
    return tmp_path


@pytest.fixture
def opened(root: Path) -> Iterator[DiskTier]:
    tier = open_disk(root)
    yield tier
    tier.close()


def _listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the subdirectories that are listed from now on."""
    listed: list[str] = []
    real = os.scandir

    def scandir(path: str) -> object:
        if len(Path(path).name) == 2:
            listed.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return listed


def test_the_index_keeps_the_order_and_replaces_the_listing(
    opened: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = _listings(monkeypatch)
    assert opened.scan() == ORDER
    assert listed == []
    assert opened.used_bytes == len(ORDER) * ITEM_BYTES
    assert [get(opened, chunk) for chunk in ORDER] == [GetOutcome.OK] * len(ORDER)


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
        tier.close()


def test_a_process_that_was_killed_leaves_an_index_that_is_not_believed(root: Path) -> None:
    """It has added, replaced and removed chunks, and has written no index."""
    killed = open_disk(root)
    killed.scan()
    put(killed, key(6))
    killed.delete(keys(1))
    put(killed, key(7))  # into the file of the removed one
    killed.delete(keys(2))
    for path in killed._paths:
        path.close()  # as the kernel does
    again = open_disk(root)
    found = again.scan()
    assert found[:3] == keys(3, 4, 5)
    assert {*found[3:]} == {*keys(6, 7)}  # written within one tick of the kernel's clock of files
    assert again.used_bytes == bytes_under(root) - _index_bytes(root) == 5 * ITEM_BYTES
    again.close()


def _index_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob(".index"))


def test_an_index_written_while_files_change_is_not_believed(root: Path) -> None:
    tier = open_disk(root)
    tier.scan()
    put(tier, key(6))
    tier.save(ORDER, is_final=False)
    tier.close()
    again = open_disk(root)
    assert again.scan() == [*ORDER, key(6)]
    again.close()


def test_an_index_that_misses_a_file_is_not_believed(root: Path) -> None:
    """A chunk that was cleared, and whose file is still there, must be counted."""
    tier = open_disk(root)
    tier.scan()
    tier.save(ORDER[:-1], is_final=True)
    tier.close()
    again = open_disk(root)
    assert {*again.scan()} == {*ORDER}
    again.close()


def test_the_index_of_another_layout_is_not_believed(root: Path) -> None:
    other = root / ("e" * 32)
    shutil.copytree(root / FINGERPRINT, other)
    for file in other.rglob("*.kv"):
        file.unlink()
    tier = open_disk(root, fingerprint="e" * 32)
    assert tier.scan() == []
    tier.close()


def test_the_order_is_kept_over_all_paths(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    many = keys(*range(40))
    tier = open_disk(*roots)
    tier.scan()
    for chunk in many:
        put(tier, chunk)
    random.Random(1).shuffle(many)
    for path in range(tier.paths):
        tier.save(many, path, is_final=True)
    tier.close()
    again = open_disk(*roots)
    assert again.scan() == many
    again.close()


def test_layouts_that_are_no_longer_served_leave_in_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that was not used for longest first, its oldest chunks first."""
    chunks = 400
    for fingerprint, order in (("a" * 32, keys(*range(200))), ("b" * 32, keys(*range(200, 400)))):
        theirs = open_disk(tmp_path, fingerprint=fingerprint)
        theirs.scan()
        for chunk in order:
            put(theirs, chunk)
        theirs.save(order, is_final=True)
        theirs.close()
    ours = open_disk(tmp_path, chunks=chunks)
    ours.scan()
    assert _left(tmp_path, "a") == list(range(200))
    with caplog.at_level(logging.INFO):
        for number in range(1000, 1100):
            assert put(ours, key(number)) is PutOutcome.STORED
            if number % 25 == 0:
                assert bytes_under(tmp_path) - _index_bytes(tmp_path) <= ours.capacity_bytes
    assert len(caplog.messages) <= 100 / 4
    left = _left(tmp_path, "a")
    assert left == list(range(200 - len(left), 200))
    assert 90 <= len(left) <= 100
    assert _left(tmp_path, "b") == list(range(200, 400))
    ours.close()


def _left(root: Path, layout: str) -> list[int]:
    names = {file.stem for file in (root / (layout * 32)).rglob("*.kv")}
    return [number for number in range(400) if key(number).hex() in names]
