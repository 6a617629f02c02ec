"""The disk tier: what can happen to files of slots, and that none of it is served."""

import errno
import gc
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.layout_directory import DirectoryInUseError
from cacheengine.tiers.slot_file import SEAL_BYTES, SlotFile
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, key, keys, payload
from tests.cacheengine.tiers.disk_chunks import (
    FINGERPRINT,
    ITEM_BYTES,
    flip,
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


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    disk = open_disk(tmp_path)
    disk.scan()
    yield disk
    disk.close()


def test_a_chunk_and_its_seal_are_in_one_slot(tier: DiskTier, tmp_path: Path) -> None:
    assert tier.item_bytes == CHUNK_BYTES + SEAL_BYTES
    assert {*put_all(tier, keys(1, 2))} == {PutOutcome.STORED}
    found = stored_chunks(tmp_path / FINGERPRINT)
    assert found == {chunk: place_of(tier, chunk) for chunk in keys(1, 2)}
    for chunk, (file, offset) in found.items():
        assert file.read_bytes()[offset : offset + CHUNK_BYTES] == payload(chunk)


def test_many_chunks_make_few_files_and_calls(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("open", "preadv", "pwritev", "unlink", "rename", "replace"):
        _note(monkeypatch, name, calls)
    for batch in range(10):
        put_all(tier, keys(*range(batch * 32, batch * 32 + 32)))
    assert get_all(tier, keys(*range(96, 128))) == [GetOutcome.OK] * 32
    tier.delete(keys(*range(64)))
    put_all(tier, keys(*range(1000, 1032)))
    names = [name for name in calls if name != "open"]
    assert names == ["pwritev"] * 10 + ["preadv", "pwritev"]
    assert len([*tmp_path.rglob("*.kv")]) == calls.count("open") == 1


def _note(patch: pytest.MonkeyPatch, name: str, calls: list[str]) -> None:
    real = getattr(os, name)

    def noting(*args: object, **options: object) -> object:
        # Memory of a test that is not aligned is moved by the page cache.
        if not str(args[0]).startswith("/proc/"):
            calls.append(name)
        return real(*args, **options)

    patch.setattr(os, name, noting)


@pytest.mark.parametrize(
    "position",
    [0, 5000, *range(CHUNK_BYTES - 1, CHUNK_BYTES + 110, 5), ITEM_BYTES - 1],
)
def test_a_flipped_bit_anywhere_is_damage(tier: DiskTier, position: int) -> None:
    put_all(tier, keys(1, 2, 3))
    flip(place_of(tier, key(2)), position)
    damaged = [GetOutcome.OK, GetOutcome.DAMAGED, GetOutcome.OK]
    assert get_all(tier, keys(1, 2, 3)) == damaged
    assert get(tier, key(2)) is GetOutcome.MISSING
    assert tier.used_bytes < 1000 * ITEM_BYTES


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, ITEM_BYTES - 1])
def test_a_file_that_was_cut_is_damage_of_what_was_there(tier: DiskTier, size: int) -> None:
    put_all(tier, keys(1, 2, 3))
    file, offset = place_of(tier, key(2))
    os.truncate(file, offset + size)
    expected = [GetOutcome.OK, GetOutcome.DAMAGED, GetOutcome.DAMAGED]
    assert get_all(tier, keys(1, 2, 3)) == expected
    assert {*put_all(tier, keys(2, 3, 4))} == {PutOutcome.STORED}
    assert get_all(tier, keys(1, 2, 3, 4)) == [GetOutcome.OK] * 4


def test_a_chunk_under_another_key_is_damage(tier: DiskTier) -> None:
    """A slot that someone copied is whole, and still not what is asked for."""
    put_all(tier, keys(1, 2))
    file, offset = place_of(tier, key(1))
    overwrite(place_of(tier, key(2)), 0, file.read_bytes()[offset : offset + ITEM_BYTES])
    assert get_all(tier, keys(1, 2)) == [GetOutcome.OK, GetOutcome.DAMAGED]


def test_a_chunk_of_another_layout_is_damage(tier: DiskTier, tmp_path: Path) -> None:
    other = open_disk(tmp_path, fingerprint="e" * 32)
    for each in (tier, other):
        put(each, key(1))
    file, offset = place_of(other, key(1))
    overwrite(place_of(tier, key(1)), 0, file.read_bytes()[offset : offset + ITEM_BYTES])
    assert get(tier, key(1)) is GetOutcome.DAMAGED
    other.close()


def test_layouts_do_not_see_each_other(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, key(1))
    other = open_disk(tmp_path, fingerprint="e" * 32)
    assert other.scan() == []
    assert get(other, key(1)) is GetOutcome.MISSING
    other.close()


def test_a_slot_that_is_written_is_not_taken_by_another_put(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    nested: list[PutOutcome] = []

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not nested and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: nested.append(put(tier, key(2))))
            other.start()
            other.join()
        return real(fd, buffers, offset)

    put(tier, key(0))
    tier.delete(keys(0))
    monkeypatch.setattr(os, "pwritev", write)
    assert put(tier, key(1)) is PutOutcome.STORED
    assert nested == [PutOutcome.STORED]
    assert get_all(tier, keys(1, 2)) == [GetOutcome.OK] * 2


def test_a_write_that_dies_is_never_seen(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def killed(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.pwrite(fd, bytes(buffers[0]), offset)
        raise Killed

    used_bytes = tier.used_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", killed)
        with pytest.raises(Killed):
            put(tier, key(1))
    assert get(tier, key(1)) is GetOutcome.MISSING
    assert put(tier, key(2)) is PutOutcome.STORED
    assert tier.used_bytes > used_bytes
    leave_unsaved(tier)
    again = open_disk(tmp_path)
    assert again.scan() == keys(2)
    assert again.used_bytes == ITEM_BYTES
    again.close()


def _fail_with(number: int) -> object:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, PutOutcome.NO_SPACE),
        (errno.EDQUOT, PutOutcome.NO_SPACE),
        (errno.EIO, PutOutcome.FAILED),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int, outcome: PutOutcome
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", _fail_with(number))
        assert put(tier, key(1)) is outcome
    assert get(tier, key(1)) is GetOutcome.MISSING
    assert put(tier, key(1)) is PutOutcome.STORED


def test_a_bad_place_of_the_disk_is_not_tried_by_every_put(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def fail_at_the_start(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", fail_at_the_start)
    assert put(tier, key(1)) is PutOutcome.FAILED
    assert [put(tier, chunk) for chunk in keys(1, 2, 3)] == [PutOutcome.STORED] * 3


def test_a_bad_place_of_the_disk_costs_its_own_chunk(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(tier, keys(1, 2, 3, 4))
    _, bad = place_of(tier, key(3))
    real = os.preadv

    def fail_there(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(len(each) for each in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_there)
        outcomes = get_all(tier, keys(1, 2, 3, 4))
    assert outcomes == [GetOutcome.OK, GetOutcome.OK, GetOutcome.FAILED, GetOutcome.OK]
    assert get(tier, key(3)) is GetOutcome.OK


def test_a_disk_that_is_really_full() -> None:
    """/dev/full refuses every write, as a full file system does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    file = SlotFile.open("/dev/full", 0)
    file.reserve(0, 4096)
    with pytest.raises(OSError, match="space"):
        file.write([memoryview(payload(key(1)))], 0)


def test_short_writes_and_reads_are_continued(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def short_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real_write(fd, [buffers[0][:1000]], offset)

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real_read(fd, [buffers[0][:700]], offset)

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    assert {*put_all(tier, keys(1, 2))} == {PutOutcome.STORED}
    assert get_all(tier, keys(1, 2)) == [GetOutcome.OK] * 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_read_error_is_no_proof_of_damage(
    tier: DiskTier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    put(tier, key(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _fail_with(number))
        assert [get(tier, key(1)) for _ in range(3)] == [GetOutcome.FAILED] * 3
    assert len(caplog.messages) == 1
    with caplog.at_level(logging.INFO):
        assert get(tier, key(1)) is GetOutcome.OK
    assert "can read" in caplog.messages[-1]


def test_no_descriptor_left_costs_new_files_only(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_with(errno.EMFILE))
        assert put(tier, key(1)) is PutOutcome.FAILED
    assert put(tier, key(1)) is PutOutcome.STORED
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_with(errno.EMFILE))
        assert get(tier, key(1)) is GetOutcome.OK


def test_memory_of_another_size_reaches_into_no_other_slot(tier: DiskTier) -> None:
    put_all(tier, keys(1, 2))
    with pytest.raises(ValueError, match="bytes"):
        tier.put(key(3), memoryview(bytes(CHUNK_BYTES + 4096)))
    with pytest.raises(ValueError, match="bytes"):
        tier.get(key(1), memoryview(bytearray(CHUNK_BYTES + 4096)))
    assert put(tier, key(3)) is PutOutcome.STORED
    assert get_all(tier, keys(1, 2, 3)) == [GetOutcome.OK] * 3


# --- an operator removes files ---


def test_a_directory_removed_under_us_is_made_again(tier: DiskTier) -> None:
    put_all(tier, keys(1, 2))
    shutil.rmtree(tier.directories[0])
    assert get(tier, key(1)) is GetOutcome.MISSING
    assert tier.used_bytes == 0
    tier.delete(keys(1))
    assert put(tier, key(1)) is PutOutcome.STORED
    assert place_of(tier, key(1))[0].exists()
    assert get_all(tier, keys(1, 2)) == [GetOutcome.OK, GetOutcome.MISSING]


def test_a_put_notices_that_its_file_was_removed(tier: DiskTier) -> None:
    put_all(tier, keys(1, 2, 3))
    tier.delete(keys(1))
    file, _ = place_of(tier, key(2))
    file.unlink()
    assert put(tier, key(4)) is PutOutcome.STORED
    assert stored_chunks(file.parent).keys() == {key(4)}
    assert get_all(tier, keys(2, 3, 4)) == [GetOutcome.MISSING, GetOutcome.MISSING, GetOutcome.OK]


def test_a_file_removed_while_it_is_written_is_not_believed(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next put makes it again while the first still writes to the removed one."""
    put(tier, key(1))
    file, _ = place_of(tier, key(1))
    real = os.pwritev
    nested: list[PutOutcome] = []

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not nested and threading.current_thread() is threading.main_thread():
            file.unlink()
            other = threading.Thread(target=lambda: nested.append(put(tier, key(3))))
            other.start()
            other.join()
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        put(tier, key(2))
    assert nested == [PutOutcome.STORED]
    assert get_all(tier, keys(1, 2)) == [GetOutcome.MISSING] * 2
    assert get(tier, key(3)) is GetOutcome.OK
    assert {*put_all(tier, keys(*range(10, 20)))} == {PutOutcome.STORED}
    assert get_all(tier, keys(3, *range(10, 20))) == [GetOutcome.OK] * 11


def test_a_file_replaced_by_a_directory_fails_puts_only(tier: DiskTier) -> None:
    put(tier, key(1))
    file, _ = place_of(tier, key(1))
    file.unlink()
    file.mkdir()
    assert put(tier, key(2)) is PutOutcome.FAILED
    assert get(tier, key(1)) is GetOutcome.MISSING
    file.rmdir()
    assert put(tier, key(2)) is PutOutcome.STORED


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    gc.collect()  # files of tests before this one
    before = _open_descriptors()
    tier = open_disk(tmp_path)
    tier.scan()
    for chunk in keys(*range(20)):
        put(tier, chunk)
        get(tier, chunk)
        flip(place_of(tier, chunk), 10)
        get(tier, chunk)
        get(tier, chunk)
    assert _open_descriptors() == before + 2  # the lock, a file of slots
    shutil.rmtree(tier.directories[0])
    put(tier, key(1))
    assert _open_descriptors() == before + 2
    tier.close()
    assert _open_descriptors() == before


def test_a_directory_moved_away_is_read_and_not_mixed_with_another(
    tier: DiskTier, tmp_path: Path
) -> None:
    """As a file system that was unmounted while its files were open."""
    put(tier, key(1))
    directory = tier.directories[0]
    directory.rename(tmp_path / "away")
    assert get(tier, key(1)) is GetOutcome.OK
    thief = open_disk(tmp_path)
    thief.scan()
    assert put(thief, key(2)) is PutOutcome.STORED
    shutil.rmtree(tmp_path / "away")
    assert get(tier, key(1)) is GetOutcome.MISSING
    assert put(tier, key(1)) is PutOutcome.FAILED
    tier.close()
    assert get(thief, key(2)) is GetOutcome.OK
    assert place_of(thief, key(2))[0].exists()
    thief.close()


def test_new_files_wait_for_a_directory_that_is_away(tier: DiskTier, tmp_path: Path) -> None:
    directory = tier.directories[0]
    directory.rename(tmp_path / "away")
    directory.mkdir()
    assert put(tier, key(1)) is PutOutcome.FAILED
    assert [*directory.iterdir()] == []
    directory.rmdir()
    (tmp_path / "away").rename(directory)
    assert put(tier, key(1)) is PutOutcome.STORED


# --- owners ---


def test_two_owners_are_refused_until_the_first_is_gone(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(DirectoryInUseError, match="a directory of its own"):
        open_disk(tmp_path)
    tier.close()
    open_disk(tmp_path).close()


def test_after_its_end_a_tier_writes_nothing(tier: DiskTier, tmp_path: Path) -> None:
    """A call that comes too late must not write where another process may be."""
    put(tier, key(1))
    tier.close()
    assert put(tier, key(2)) is PutOutcome.FAILED
    assert get(tier, key(1)) is not GetOutcome.OK
    again = open_disk(tmp_path)
    assert again.scan() == keys(1)
    again.close()


def test_what_another_process_owns_or_did_not_make_is_left_alone(
    tier: DiskTier, tmp_path: Path
) -> None:
    put(tier, key(1))
    foreign = [tmp_path / ("a" * 32) / name for name in ("ab/x.kv", "00.kv")]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("no lock file beside it: not ours")
    other = open_disk(tmp_path, fingerprint="e" * 32, chunks=0)
    other.scan()
    other.close()
    assert get(tier, key(1)) is GetOutcome.OK
    assert all(file.exists() for file in foreign)


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(4096, 32), (1 << 20, 4), (32 << 20, 1)])
def test_a_batch_is_bounded_in_bytes(tmp_path: Path, chunk_bytes: int, chunks: int) -> None:
    """Until a batch ends, its tier counts as one that ends no read."""
    tier = DiskTier([tmp_path], FINGERPRINT, chunk_bytes, 10 * chunk_bytes)
    assert tier.batch_chunks == chunks
    tier.close()


def test_chunks_that_are_not_whole_pages_lie_side_by_side(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], FINGERPRINT, 5000, 1 << 20, lock_wait_s=0.0)
    tier.scan()
    assert tier.item_bytes == 8192 + SEAL_BYTES
    chunks = keys(*range(5))
    tier.put_many([(chunk, memoryview(payload(chunk, 5000))) for chunk in chunks])
    leave_unsaved(tier)
    again = DiskTier([tmp_path], FINGERPRINT, 5000, 1 << 20, lock_wait_s=0.0)
    assert again.scan() == chunks
    for asked in (chunks, chunks[2:3]):
        buffers = [bytearray(5000) for _ in asked]
        ended = again.get_many(
            [(chunk, memoryview(each)) for chunk, each in zip(asked, buffers, strict=True)]
        )
        assert ended == [GetOutcome.OK] * len(asked)
        assert buffers == [payload(chunk, 5000) for chunk in asked]
    again.close()


def test_a_large_tier_has_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions go to files in turns; a chunk is found in its place after a kill, too."""
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 2 * ITEM_BYTES)
    monkeypatch.setattr("cacheengine.tiers.disk_path._FILES", 4)
    tier = open_disk(tmp_path, chunks=100)
    tier.scan()
    many = keys(*range(100))
    for start in range(0, 100, 20):
        assert {*put_all(tier, many[start : start + 20])} == {PutOutcome.STORED}
    assert put(tier, key(100)) is PutOutcome.NO_SPACE
    assert len([*tmp_path.rglob("*.kv")]) == 4
    places = [place_of(tier, chunk) for chunk in many]
    assert len({*places}) == 100
    for first, second in itertools.pairwise(sorted(places)):
        assert first[0] != second[0] or second[1] - first[1] == ITEM_BYTES
    leave_unsaved(tier)
    again = open_disk(tmp_path, chunks=100)
    assert again.scan() == many
    assert get_all(again, many) == [GetOutcome.OK] * 100
    assert again.used_bytes == 100 * ITEM_BYTES
    again.close()
