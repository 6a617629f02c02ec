"""The disk tier: what can happen to files, and that none of it is served."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.chunk_file import SEAL_BYTES, ChunkFile
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.disk_space import DirectoryInUseError
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, key, keys, payload
from tests.cacheengine.tiers.disk_chunks import FINGERPRINT, get, open_disk, put


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    disk = open_disk(tmp_path)
    disk.scan()
    yield disk
    disk.close()


def test_a_file_per_chunk_where_it_says(tier: DiskTier, tmp_path: Path) -> None:
    assert put(tier, key(1)) is PutOutcome.STORED
    name = key(1).hex()
    file = tmp_path / FINGERPRINT / name[:2] / f"{name}.kv"
    assert file.stat().st_size == tier.item_bytes == CHUNK_BYTES + SEAL_BYTES
    assert file.read_bytes()[:CHUNK_BYTES] == payload(key(1))


@pytest.mark.parametrize(
    "position",
    [0, 5000, *range(CHUNK_BYTES - 1, CHUNK_BYTES + 110, 5), -1],
)
def test_a_flipped_bit_anywhere_is_damage(tier: DiskTier, position: int) -> None:
    put(tier, key(1))
    file = tier.path(key(1))
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)
    assert get(tier, key(1)) is GetOutcome.DAMAGED
    assert not file.exists()
    assert get(tier, key(1)) is GetOutcome.MISSING


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + SEAL_BYTES - 1])
def test_a_file_that_is_too_short_is_damage(tier: DiskTier, size: int) -> None:
    put(tier, key(1))
    os.truncate(tier.path(key(1)), size)
    assert get(tier, key(1)) is GetOutcome.DAMAGED
    assert not tier.path(key(1)).exists()


def test_a_file_that_shrinks_while_it_is_read_is_damage(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, key(1))
    real = os.preadv

    def truncate_then_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(tier.path(key(1)), 100)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate_then_read)
    assert get(tier, key(1)) is GetOutcome.DAMAGED


def test_a_chunk_under_another_key_is_damage(tier: DiskTier) -> None:
    """A file that someone renamed is whole, and still not what is asked for."""
    put(tier, key(1))
    tier.path(key(2)).parent.mkdir(exist_ok=True)
    tier.path(key(1)).rename(tier.path(key(2)))
    assert get(tier, key(2)) is GetOutcome.DAMAGED


def test_a_chunk_of_another_layout_is_damage(tier: DiskTier, tmp_path: Path) -> None:
    other = open_disk(tmp_path, fingerprint="e" * 32)
    put(other, key(1))
    tier.path(key(1)).parent.mkdir(exist_ok=True)
    other.path(key(1)).rename(tier.path(key(1)))
    assert get(tier, key(1)) is GetOutcome.DAMAGED
    other.close()


def test_layouts_do_not_see_each_other(tier: DiskTier, tmp_path: Path) -> None:
    put(tier, key(1))
    other = open_disk(tmp_path, fingerprint="e" * 32)
    assert other.scan() == []
    assert _get_missing(other)
    other.close()


def _get_missing(tier: DiskTier) -> bool:
    return get(tier, key(1)) is GetOutcome.MISSING


def test_without_an_index_scan_is_in_order_of_writing(tier: DiskTier, tmp_path: Path) -> None:
    for age_s, chunk in enumerate(keys(3, 1, 2)):
        put(tier, chunk)
        os.utime(tier.path(chunk), (1000 - age_s, 1000 - age_s))
    tier.close()
    again = open_disk(tmp_path)
    assert again.scan() == keys(2, 1, 3)
    again.close()


def test_scan_removes_what_is_not_whole_and_leaves_what_is_not_ours(
    tier: DiskTier, tmp_path: Path
) -> None:
    """A process killed between writing and renaming leaves a temporary file."""
    for chunk in keys(1, 2):
        put(tier, chunk)
    whole = tier.path(key(1))
    leftover = whole.with_name(whole.name + ".tmp")
    leftover.write_bytes(whole.read_bytes()[:5000])
    os.truncate(tier.path(key(2)), 5000)
    foreign = [whole.with_name("notes.txt"), whole.with_name("xyz.kv")]
    for file in foreign:
        file.write_text("not a chunk")
    tier.close()
    again = open_disk(tmp_path)
    assert again.scan() == keys(1)
    assert not leftover.exists()
    assert not tier.path(key(2)).exists()
    assert all(file.exists() for file in foreign)
    again.close()


def test_a_write_that_dies_before_its_rename_is_never_seen(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def killed(file: str, target: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            put(tier, key(1))
    assert get(tier, key(1)) is GetOutcome.MISSING
    tier.close()
    again = open_disk(tmp_path)
    assert again.scan() == []
    assert list(again.directories[0].rglob("*.tmp")) == []
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
    assert [file for file in tier.directories[0].rglob("*") if ".kv" in file.name] == []
    assert put(tier, key(1)) is PutOutcome.STORED


def test_a_disk_that_is_really_full() -> None:
    """/dev/full refuses every write, as a full file system does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="space"):
            ChunkFile(FINGERPRINT, CHUNK_BYTES).write(
                fd, key(1), memoryview(payload(key(1))), is_new=True
            )
    finally:
        os.close(fd)


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
    assert put(tier, key(1)) is PutOutcome.STORED
    assert get(tier, key(1)) is GetOutcome.OK


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_read_error_is_no_proof_of_damage(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(tier, key(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _fail_with(number))
        assert get(tier, key(1)) is GetOutcome.FAILED
    assert get(tier, key(1)) is GetOutcome.OK


def test_no_descriptor_left_is_no_proof_of_damage(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, key(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_with(errno.EMFILE))
        assert get(tier, key(1)) is GetOutcome.FAILED
        assert put(tier, key(2)) is PutOutcome.FAILED
    assert get(tier, key(1)) is GetOutcome.OK


def test_a_directory_removed_under_us_is_made_again(tier: DiskTier) -> None:
    import shutil

    put(tier, key(1))
    shutil.rmtree(tier.directories[0])
    assert get(tier, key(1)) is GetOutcome.MISSING
    tier.delete(keys(1))
    assert put(tier, key(1)) is PutOutcome.STORED
    assert get(tier, key(1)) is GetOutcome.OK


def test_a_directory_replaced_by_a_file_fails_puts_only(tier: DiskTier) -> None:
    tier.directories[0].joinpath(key(1).hex()[:2]).write_text("in the way")
    assert put(tier, key(1)) is PutOutcome.FAILED
    assert get(tier, key(1)) is GetOutcome.FAILED


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_leak(tier: DiskTier) -> None:
    before = _open_descriptors()
    for chunk in keys(*range(20)):
        put(tier, chunk)
        get(tier, chunk)
        os.truncate(tier.path(chunk), 10)
        get(tier, chunk)
        get(tier, chunk)
    assert _open_descriptors() == before


def test_two_owners_are_refused_until_the_first_is_gone(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(DirectoryInUseError, match="a directory of its own"):
        open_disk(tmp_path)
    tier.close()
    open_disk(tmp_path).close()


def test_other_models_get_what_this_one_leaves_of_the_limit(tier: DiskTier, tmp_path: Path) -> None:
    """Else every change of model would leave a full disk behind."""
    for age_s, chunk in enumerate(keys(1, 2, 3)):
        put(tier, chunk)
        os.utime(tier.path(chunk), (1000 - age_s, 1000 - age_s))
    tier.close()
    other = open_disk(tmp_path, fingerprint="e" * 32, chunks=2)
    assert other.scan() == []
    assert [tier.path(chunk).exists() for chunk in keys(1, 2, 3)] == [True, True, False]
    put(other, key(4))
    other.close()
    again = open_disk(tmp_path, fingerprint="e" * 32, chunks=2)
    assert again.scan() == keys(4)
    assert [tier.path(chunk).exists() for chunk in keys(1, 2, 3)] == [True, False, False]
    again.close()


def test_what_another_process_owns_or_did_not_make_is_left_alone(
    tier: DiskTier, tmp_path: Path
) -> None:
    put(tier, key(1))
    foreign = tmp_path / ("a" * 32) / "ab" / "x.kv"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("no lock file beside it: not ours")
    other = open_disk(tmp_path, fingerprint="e" * 32, chunks=0)
    other.scan()
    other.close()
    assert tier.path(key(1)).exists()
    assert foreign.exists()


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(4096, 32), (1 << 20, 4), (32 << 20, 1)])
def test_a_batch_is_bounded_in_bytes(tmp_path: Path, chunk_bytes: int, chunks: int) -> None:
    """Until a batch ends, its tier counts as one that ends no read."""
    tier = DiskTier([tmp_path], FINGERPRINT, chunk_bytes, 10 * chunk_bytes)
    assert tier.batch_chunks == chunks
    tier.close()


def test_names_of_files_leave_the_interpreters_table_of_strings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That table is made again, megabytes in one piece, when enough names have come and gone."""
    disk = open_disk(tmp_path, chunks=8)
    disk.scan()
    put(disk, key(0))  # makes the directory
    interned: list[str] = []

    def intern(text: str) -> str:
        interned.append(text)
        return text

    monkeypatch.setattr(sys, "intern", intern)
    for chunk in keys(0, 1, 2):
        assert put(disk, chunk) is PutOutcome.STORED
        assert get(disk, chunk) is GetOutcome.OK
    disk.delete(keys(0, 1))
    assert put(disk, key(3)) is PutOutcome.STORED  # into a spare
    monkeypatch.undo()
    disk.close()
    assert not [text for text in interned if ".kv" in text]
