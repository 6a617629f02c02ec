"""I/O past the page cache: where it is possible, when it is used, that it is right."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers import chunk_file
from cacheengine.tiers.chunk_file import why_not_direct
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys, payload

CHUNK_BYTES = 64 * 4096


def _open(
    root: Path, *, chunk_bytes: int = CHUNK_BYTES, direct: bool = True, direct_writes: bool = False
) -> DiskTier:
    return DiskTier(
        [root],
        "a" * 32,
        chunk_bytes,
        1 << 30,
        direct=direct,
        direct_writes=direct_writes,
        lock_wait_s=0.0,
    )


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    if reason := why_not_direct(tmp_path):
        pytest.skip(f"no direct reads here: {reason}")
    disk = _open(tmp_path)
    disk.scan()
    yield disk
    disk.close()


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each value that `set_direct` was called with, but for the probe of a directory."""
    values: list[bool] = []
    real = chunk_file.set_direct

    def note(fd: int, direct: bool) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name != ".probe":
            values.append(direct)
        real(fd, direct)

    monkeypatch.setattr(chunk_file, "set_direct", note)
    return values


def _put(tier: DiskTier, chunk: bytes) -> PutOutcome:
    return tier.put(chunk, memoryview(payload(chunk, CHUNK_BYTES)))


def _get(tier: DiskTier, chunk: bytes, *, misaligned_by: int = 0) -> GetOutcome:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES + 4096))
    buffer = memory[misaligned_by : misaligned_by + CHUNK_BYTES]
    outcome = tier.get(chunk, buffer)
    assert outcome is not GetOutcome.OK or buffer == payload(chunk, CHUNK_BYTES)
    return outcome


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_only_what_the_page_cache_does_not_have_is_read_past_it(
    tier: DiskTier, direct_reads: list[bool]
) -> None:
    for chunk in keys(1, 2):
        assert _put(tier, chunk) is PutOutcome.STORED
    _forget(tier.path(key(1)))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == [True]
    assert _get(tier, key(2)) is GetOutcome.OK
    assert direct_reads == [True]


def test_a_put_is_read_rightly_before_it_is_on_the_device(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, direct_reads: list[bool]
) -> None:
    monkeypatch.setattr(chunk_file, "cached_bytes", lambda *_: 0)
    _put(tier, key(1))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == [True]


@pytest.mark.parametrize("position", [0, CHUNK_BYTES // 2, CHUNK_BYTES - 1, CHUNK_BYTES, -1])
def test_a_flipped_bit_is_found_in_a_direct_read(
    tier: DiskTier, direct_reads: list[bool], position: int
) -> None:
    _put(tier, key(1))
    content = bytearray(tier.path(key(1)).read_bytes())
    content[position] ^= 1
    tier.path(key(1)).write_bytes(content)
    _forget(tier.path(key(1)))
    assert _get(tier, key(1)) is GetOutcome.DAMAGED
    assert direct_reads == [True]


def test_memory_that_is_not_aligned_is_read_into_by_the_page_cache(
    tier: DiskTier, direct_reads: list[bool]
) -> None:
    _put(tier, key(1))
    _forget(tier.path(key(1)))
    assert _get(tier, key(1), misaligned_by=17) is GetOutcome.OK
    assert direct_reads == [True, False]


def test_a_direct_read_that_is_cut_short_is_done_again(
    tier: DiskTier, direct_reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tier, key(1))
    _forget(tier.path(key(1)))
    real = os.preadv
    lengths = [1000]

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return lengths.pop() if lengths else real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", short)
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == [True, False]


def test_an_error_of_the_device_is_not_hidden(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tier, key(1))
    _forget(tier.path(key(1)))

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert _get(tier, key(1)) is GetOutcome.FAILED
    assert _get(tier, key(1)) is GetOutcome.OK


def test_chunks_that_are_no_whole_pages_are_never_read_so(
    tmp_path: Path, direct_reads: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vllm.warmroute"):
        tier = _open(tmp_path, chunk_bytes=5000)
    assert "not a multiple of 4096" in caplog.text
    content = payload(key(1), 5000)
    tier.put(key(1), memoryview(content))
    _forget(tier.path(key(1)))
    buffer = bytearray(5000)
    assert tier.get(key(1), memoryview(buffer)) is GetOutcome.OK
    assert buffer == content
    assert direct_reads == []
    tier.close()


def test_they_can_be_switched_off(tmp_path: Path, direct_reads: list[bool]) -> None:
    tier = _open(tmp_path, direct=False)
    _put(tier, key(1))
    _forget(tier.path(key(1)))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == []
    tier.close()


@pytest.mark.parametrize("where", ["write", "cachestat", "flag"])
def test_a_file_system_that_cannot_is_found_out_at_start(
    tmp_path: Path,
    direct_reads: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch:
        if where == "cachestat":
            patch.setattr(chunk_file, "cached_bytes", lambda *_: None)
        else:
            patch.setattr(
                *((os, "pwritev") if where == "open" else (chunk_file, "set_direct")), refuse
            )
        with caplog.at_level("INFO", logger="vllm.warmroute"):
            tier = _open(tmp_path)
    assert "all reads of" in caplog.text
    _put(tier, key(1))
    _forget(tier.path(key(1)))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == []
    tier.close()
    assert [file.name for file in tmp_path.rglob(".probe")] == []


def test_a_file_gets_its_blocks_before_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        if not chunk_file.reserve(fd, 1 << 20):
            pytest.skip("this file system cannot reserve blocks")
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
        with pytest.raises(OSError, match="large") as caught:
            chunk_file.reserve(fd, 1 << 62)
        assert caught.value.errno == errno.EFBIG
    finally:
        os.close(fd)


def test_what_is_no_file_cannot_reserve() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="seek"):
            chunk_file.reserve(write_end, 4096)
        fd = os.open("/dev/null", os.O_WRONLY)
        assert not chunk_file.reserve(fd, 4096)
        os.close(fd)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier that writes past the page cache."""
    if reason := why_not_direct(tmp_path, reads=False):
        pytest.skip(f"no direct writes here: {reason}")
    disk = _open(tmp_path, direct_writes=True)
    disk.scan()
    yield disk
    disk.close()


def _put_aligned(tier: DiskTier, chunk: bytes, *, misaligned_by: int = 0) -> PutOutcome:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES + 4096))
    buffer = memory[misaligned_by : misaligned_by + CHUNK_BYTES]
    buffer[:] = payload(chunk, CHUNK_BYTES)
    return tier.put(chunk, buffer)


def _cached_bytes(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return chunk_file.cached_bytes(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def test_what_is_written_directly_takes_no_page_cache_and_is_read_back(
    writing: DiskTier, direct_reads: list[bool]
) -> None:
    for chunk in keys(1, 2, 3):
        assert _put_aligned(writing, chunk) is PutOutcome.STORED
        assert _cached_bytes(writing.path(chunk)) in (0, None)
    assert direct_reads == [True] * 3
    for chunk in keys(1, 2, 3):
        assert _get(writing, chunk) is GetOutcome.OK


def test_a_spare_file_that_the_page_cache_has_is_written_over_rightly(writing: DiskTier) -> None:
    _put_aligned(writing, key(1))
    writing.path(key(1)).read_bytes()  # now it is in the page cache
    writing.delete(keys(1))
    _put_aligned(writing, key(2))
    assert _get(writing, key(2)) is GetOutcome.OK
    assert writing.path(key(2)).read_bytes()[:CHUNK_BYTES] == payload(key(2), CHUNK_BYTES)


def test_memory_that_is_not_aligned_is_written_by_the_page_cache(
    writing: DiskTier, direct_reads: list[bool]
) -> None:
    assert _put_aligned(writing, key(1), misaligned_by=17) is PutOutcome.STORED
    assert direct_reads == [True, False]
    assert _get(writing, key(1)) is GetOutcome.OK


def test_a_direct_write_that_is_cut_short_is_done_again(
    writing: DiskTier, direct_reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    lengths = [1000]

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, buffers, offset) and lengths.pop() if lengths else real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", short)
    assert _put_aligned(writing, key(1)) is PutOutcome.STORED
    assert direct_reads == [True, False]
    assert _get(writing, key(1)) is GetOutcome.OK


def test_direct_writes_need_nothing_of_the_kernel_but_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_reads: list[bool]
) -> None:
    """A kernel that does not say what the page cache has reads by it, and writes past it."""
    if reason := why_not_direct(tmp_path, reads=False):
        pytest.skip(f"no direct writes here: {reason}")
    monkeypatch.setattr(chunk_file, "cached_bytes", lambda *_: None)
    tier = _open(tmp_path, direct_writes=True)
    assert _put_aligned(tier, key(1)) is PutOutcome.STORED
    assert direct_reads == [True]
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_reads == [True]
    tier.close()
