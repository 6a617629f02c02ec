"""The disk tier's limit: kept to the byte, whatever cannot be removed."""

import errno
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys
from tests.cacheengine.tiers.disk_chunks import ITEM_BYTES, bytes_under, get, open_disk, put

OURS, THEIRS = "a" * 32, "b" * 32


def _open(root: Path, fingerprint: str = OURS, *, chunks: int = 4) -> DiskTier:
    return open_disk(root, fingerprint=fingerprint, chunks=chunks)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    disk = _open(tmp_path)
    disk.scan()
    yield disk
    disk.close()


class Refusal:
    """A file system that refuses to remove or rename these files."""

    def __init__(self, patch: pytest.MonkeyPatch, *files: Path, number: int = errno.EACCES) -> None:
        self._refused = set(files)
        self._number = number
        for name in ("unlink", "rename"):
            self._put_before(patch, name)

    def _put_before(self, patch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(os, name)

        def call(path: str | Path, *args: object, **options: object) -> object:
            if Path(path) in self._refused:
                raise OSError(self._number, os.strerror(self._number), os.fspath(path))
            return real(path, *args, **options)

        patch.setattr(os, name, call)

    def end(self) -> None:
        self._refused.clear()


def test_a_file_that_cannot_be_removed_is_counted_and_tried_again(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in keys(1, 2, 3, 4):
        assert put(tier, chunk) is PutOutcome.STORED
    refusal = Refusal(monkeypatch, tier.path(key(1)))
    tier.delete(keys(1))  # as the engine does before a put into a full tier
    assert tier.used_bytes == 4 * ITEM_BYTES
    assert put(tier, key(5)) is PutOutcome.NO_SPACE
    assert bytes_under(tmp_path) == tier.capacity_bytes
    refusal.end()
    assert put(tier, key(5)) is PutOutcome.STORED
    assert not tier.path(key(1)).exists()
    assert tier.used_bytes == bytes_under(tmp_path) == tier.capacity_bytes


def test_a_chunk_put_again_over_a_file_that_resisted_stays(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing it later, as what should have gone, would remove the new one."""
    put(tier, key(1))
    refusal = Refusal(monkeypatch, tier.path(key(1)))
    tier.delete(keys(1))
    assert put(tier, key(1)) is PutOutcome.STORED
    refusal.end()
    put(tier, key(2))
    assert get(tier, key(1)) is GetOutcome.OK
    assert tier.used_bytes == bytes_under(tmp_path) == 2 * ITEM_BYTES


def test_a_file_is_not_removed_while_it_is_put_again(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's put tries the files that resisted again, this one must not be among them."""
    put(tier, key(1))
    refusal = Refusal(monkeypatch, tier.path(key(1)))
    tier.delete(keys(1))
    real = os.pwritev
    nested: list[PutOutcome] = []

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not nested and threading.current_thread() is threading.main_thread():
            refusal.end()
            other = threading.Thread(target=lambda: nested.append(put(tier, key(2))))
            other.start()
            other.join()
            assert tier.path(key(1)).exists()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    assert put(tier, key(1)) is PutOutcome.STORED
    assert nested == [PutOutcome.STORED]
    assert get(tier, key(1)) is GetOutcome.OK


def test_a_name_that_was_never_there_is_not_waited_for(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only file system refuses to remove what it does not have, too."""
    for chunk in keys(1, 2, 3):
        put(tier, chunk)
    Refusal(monkeypatch, tier.path(key(9)), number=errno.EROFS)
    tier.delete(keys(9))
    assert put(tier, key(4)) is PutOutcome.STORED
    assert tier.used_bytes == 4 * ITEM_BYTES


def test_what_was_removed_makes_room_without_a_new_file(tier: DiskTier, tmp_path: Path) -> None:
    for chunk in keys(1, 2, 3, 4):
        put(tier, chunk)
    inodes = {tier.path(chunk).stat().st_ino for chunk in keys(1, 2, 3, 4)}
    tier.delete(keys(1, 2))
    for chunk in keys(1, 2):
        assert get(tier, chunk) is GetOutcome.MISSING
    for chunk in keys(5, 6):
        assert put(tier, chunk) is PutOutcome.STORED
    assert {tier.path(chunk).stat().st_ino for chunk in keys(3, 4, 5, 6)} == inodes
    assert [get(tier, chunk) for chunk in keys(3, 4, 5, 6)] == [GetOutcome.OK] * 4
    assert bytes_under(tmp_path) == tier.used_bytes == 4 * ITEM_BYTES


def test_spare_files_are_few_and_gone_at_the_end(tmp_path: Path) -> None:
    tier = _open(tmp_path, chunks=1000)
    tier.scan()
    for number in range(600):
        put(tier, key(number))
    tier.delete(keys(*range(600)))
    assert bytes_under(tmp_path) == tier.used_bytes == 16 * tier.batch_chunks * ITEM_BYTES
    tier.close()
    assert bytes_under(tmp_path) == 0


def test_spare_files_of_a_process_that_was_killed_are_removed(
    tier: DiskTier, tmp_path: Path
) -> None:
    for chunk in keys(1, 2):
        put(tier, chunk)
    tier.delete(keys(1))
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    for path in tier._paths:
        path.close()  # as the kernel does
    again = _open(tmp_path)
    assert again.scan() == keys(2)
    assert bytes_under(tmp_path) == again.used_bytes == ITEM_BYTES
    again.close()


def test_a_spare_whose_write_fails_is_removed(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, key(1))
    tier.delete(keys(1))

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert put(tier, key(2)) is PutOutcome.FAILED
    assert bytes_under(tmp_path) == tier.used_bytes == 0


def test_other_models_make_room_as_this_one_grows(tmp_path: Path) -> None:
    theirs = _open(tmp_path, THEIRS)
    for age_s, chunk in enumerate(keys(1, 2, 3, 4)):
        put(theirs, chunk)
        os.utime(theirs.path(chunk), (1000 - age_s, 1000 - age_s))
    theirs.close()
    ours = _open(tmp_path)
    assert ours.scan() == []
    for stored, chunk in enumerate(keys(11, 12, 13, 14), start=1):
        assert put(ours, chunk) is PutOutcome.STORED
        assert bytes_under(tmp_path) == ours.capacity_bytes
        left = [theirs.path(each).exists() for each in keys(1, 2, 3, 4)]
        assert left == [True] * (4 - stored) + [False] * stored  # the oldest goes first
    ours.close()


def test_what_another_process_took_since_is_not_ours_to_count(tmp_path: Path) -> None:
    theirs = _open(tmp_path, THEIRS)
    for chunk in keys(1, 2, 3, 4):
        put(theirs, chunk)
    theirs.close()
    ours = _open(tmp_path)
    ours.scan()
    theirs = _open(tmp_path, THEIRS)
    for chunk in keys(11, 12, 13, 14):
        assert put(ours, chunk) is PutOutcome.STORED
    assert all(theirs.path(chunk).exists() for chunk in keys(1, 2, 3, 4))
    theirs.close()
    ours.close()


def test_puts_wait_for_other_models_files_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _open(tmp_path, THEIRS)
    for chunk in keys(1, 2):
        put(theirs, chunk)
    theirs.close()
    ours = _open(tmp_path)
    ours.scan()
    Refusal(monkeypatch, *(theirs.path(chunk) for chunk in keys(1, 2)))
    outcomes = [put(ours, chunk) for chunk in keys(11, 12, 13)]
    assert outcomes == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.NO_SPACE]
    assert bytes_under(tmp_path) == ours.capacity_bytes
    ours.close()


@pytest.mark.parametrize("seed", range(5))
def test_never_a_byte_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """An engine that fills the tier, evicts and restarts, while removals and writes fail."""
    generator = random.Random(seed)
    capacity = 6
    broken: set[str] = set()
    for name in ("unlink", "rename", "replace"):
        _break(monkeypatch, name, broken)
    held: list[bytes] = []
    tier = _open(tmp_path, chunks=capacity)
    tier.scan()
    numbers = itertools.count()
    for _ in range(150):
        broken.clear()
        if generator.random() < 0.3:
            broken.add(generator.choice(("unlink", "rename", "replace")))
        step = generator.random()
        if step < 0.06:
            broken.clear()
            tier.close()
            tier = _open(tmp_path, chunks=capacity)
            found = tier.scan()
            assert set(found) >= set(held)
            held = found
        elif step < 0.2 and held:
            tier.delete([held.pop(generator.randrange(len(held)))])
        else:
            while len(held) >= capacity:
                tier.delete([held.pop(0)])
            chunk = key(next(numbers))
            if put(tier, chunk) is PutOutcome.STORED:
                held.append(chunk)
        assert bytes_under(tmp_path) <= tier.used_bytes <= tier.capacity_bytes
        assert all(get(tier, chunk) is GetOutcome.OK for chunk in held)
    assert len(held) > 1
    tier.close()


def _break(patch: pytest.MonkeyPatch, name: str, broken: set[str]) -> None:
    real = getattr(os, name)

    def call(path: str | Path, *args: object, **options: object) -> object:
        if name in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return real(path, *args, **options)

    patch.setattr(os, name, call)


def test_files_that_vanish_are_not_counted_for_ever(tier: DiskTier, tmp_path: Path) -> None:
    """Found out by a read, by a removal and by a put of the same chunk."""
    for chunk in keys(1, 2, 3, 4):
        put(tier, chunk)
    for chunk in keys(1, 2, 3):
        tier.path(chunk).unlink()
    assert get(tier, key(1)) is GetOutcome.MISSING
    assert get(tier, key(1)) is GetOutcome.MISSING  # once off the count
    assert tier.used_bytes == 3 * ITEM_BYTES
    tier.delete(keys(2))
    tier.delete(keys(2))
    assert tier.used_bytes == 2 * ITEM_BYTES
    put(tier, key(3))
    assert tier.used_bytes == bytes_under(tmp_path) == 2 * ITEM_BYTES


def test_a_chunk_put_twice_is_counted_once(tier: DiskTier, tmp_path: Path) -> None:
    for _ in range(3):
        put(tier, key(1))
    assert tier.used_bytes == bytes_under(tmp_path) == ITEM_BYTES


def test_what_was_there_at_start_is_taken_off_when_it_vanishes(tmp_path: Path) -> None:
    before = _open(tmp_path)
    put(before, key(1))
    put(before, key(2))
    before.close()
    again = _open(tmp_path)
    assert set(again.scan()) == set(keys(1, 2))
    again.path(key(1)).unlink()
    again.path(key(2)).unlink()
    assert get(again, key(1)) is GetOutcome.MISSING
    again.delete(keys(2))
    assert again.used_bytes == 0
    again.close()


def test_a_chunk_that_was_never_there_is_not_taken_off(tier: DiskTier) -> None:
    put(tier, key(1))
    assert get(tier, key(2)) is GetOutcome.MISSING
    tier.delete(keys(2))
    assert tier.used_bytes == ITEM_BYTES
