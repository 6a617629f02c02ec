"""I/O past the page cache: where it is possible, when it is used, that it is right."""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.slot_file import SlotFile, why_not_direct
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys, payload
from tests.cacheengine.tiers.disk_chunks import flip, leave_unsaved, place_of

CHUNK_BYTES = 64 * 4096


def _open(root: Path, *, chunk_bytes: int = CHUNK_BYTES, direct: bool = True) -> DiskTier:
    return DiskTier([root], "a" * 32, chunk_bytes, 1 << 30, direct=direct, lock_wait_s=0.0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    if reason := why_not_direct(tmp_path):
        pytest.skip(f"no direct I/O here: {reason}")
    disk = _open(tmp_path)
    disk.scan()
    yield disk
    disk.close()


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each read and write of a slot, whether it went past the page cache."""
    values: list[bool] = []

    def note(call: Callable[..., int]) -> Callable[..., int]:
        def noting(fd: int, buffers: list[memoryview], offset: int) -> int:
            if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith(".probe"):
                values.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
            return call(fd, buffers, offset)

        return noting

    monkeypatch.setattr(os, "preadv", note(os.preadv))
    monkeypatch.setattr(os, "pwritev", note(os.pwritev))
    return values


def _put(tier: DiskTier, chunk: bytes, *, misaligned_by: int = 0) -> PutOutcome:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES + 4096))
    buffer = memory[misaligned_by : misaligned_by + CHUNK_BYTES]
    buffer[:] = payload(chunk, CHUNK_BYTES)
    return tier.put(chunk, buffer)


def _get(tier: DiskTier, chunk: bytes, *, misaligned_by: int = 0) -> GetOutcome:
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES + 4096))
    buffer = memory[misaligned_by : misaligned_by + CHUNK_BYTES]
    outcome = tier.get(chunk, buffer)
    assert outcome is not GetOutcome.OK or buffer == payload(chunk, CHUNK_BYTES)
    return outcome


def test_slots_are_written_and_read_past_the_page_cache_by_one_call_each(
    tier: DiskTier, direct_calls: list[bool]
) -> None:
    for chunk in keys(1, 2, 3):
        assert _put(tier, chunk) is PutOutcome.STORED
    for chunk in keys(1, 2, 3):
        assert _get(tier, chunk) is GetOutcome.OK
    assert direct_calls == [True] * 6


def test_a_chunk_that_is_only_in_the_page_cache_is_read_rightly(
    tmp_path: Path, tier: DiskTier, direct_calls: list[bool]
) -> None:
    """As an engine leaves it that writes by the page cache."""
    tier.close()
    cached = _open(tmp_path, direct=False)
    cached.scan()
    _put(cached, key(1))
    leave_unsaved(cached)
    tier = _open(tmp_path)
    assert tier.scan() == keys(1)
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_calls[0] is False
    assert {*direct_calls[1:]} == {True}
    tier.close()


@pytest.mark.parametrize("position", [0, CHUNK_BYTES // 2, CHUNK_BYTES - 1, CHUNK_BYTES, -1])
def test_a_flipped_bit_is_found_in_a_direct_read(
    tier: DiskTier, direct_calls: list[bool], position: int
) -> None:
    _put(tier, key(1))
    flip(place_of(tier, key(1)), position % (CHUNK_BYTES + 4096))
    assert _get(tier, key(1)) is GetOutcome.DAMAGED
    assert direct_calls[-1]


def test_memory_that_is_not_aligned_is_read_into_by_the_page_cache(
    tier: DiskTier, direct_calls: list[bool]
) -> None:
    _put(tier, key(1))
    assert _get(tier, key(1), misaligned_by=17) is GetOutcome.OK
    assert direct_calls == [True, True, False]


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_direct_call_that_is_cut_short_is_done_again(
    tier: DiskTier, direct_calls: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "preadv":
        _put(tier, key(1))
    real = getattr(os, name)
    lengths = [1000]

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        moved: int = real(fd, buffers, offset)
        return lengths.pop() if lengths else moved

    with monkeypatch.context() as patch:
        patch.setattr(os, name, short)
        if name == "preadv":
            assert _get(tier, key(1)) is GetOutcome.OK
        else:
            assert _put(tier, key(1)) is PutOutcome.STORED
    assert direct_calls[-3:] == [True, True, False]
    assert _get(tier, key(1)) is GetOutcome.OK


def test_an_error_of_the_device_is_not_hidden(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tier, key(1))

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert _get(tier, key(1)) is GetOutcome.FAILED
    assert _get(tier, key(1)) is GetOutcome.OK


def test_chunks_that_are_not_whole_pages_use_the_page_cache(
    tmp_path: Path, direct_calls: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vllm.warmroute"):
        tier = _open(tmp_path, chunk_bytes=5000)
    assert "not a multiple of 4096" in caplog.text
    content = payload(key(1), 5000)
    tier.put(key(1), memoryview(content))
    buffer = bytearray(5000)
    assert tier.get(key(1), memoryview(buffer)) is GetOutcome.OK
    assert buffer == content
    assert direct_calls == [False, False]
    tier.close()


def test_it_can_be_switched_off(tmp_path: Path, direct_calls: list[bool]) -> None:
    tier = _open(tmp_path, direct=False)
    _put(tier, key(1))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_calls == [False, False]
    tier.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv", "open"])
def test_a_file_system_that_cannot_is_found_out_at_start(
    tmp_path: Path,
    direct_calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    real = getattr(os, call)

    def refuse(*args: object, **options: object) -> object:
        if call != "open" or Path(str(args[0])).name == ".probe":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with caplog.at_level("INFO", logger="vllm.warmroute"):
            tier = _open(tmp_path)
    assert "by the page cache" in caplog.text
    _put(tier, key(1))
    assert _get(tier, key(1)) is GetOutcome.OK
    assert direct_calls == [False, False]
    tier.close()
    assert [file.name for file in tmp_path.rglob(".probe")] == []


def test_a_file_gets_its_blocks_before_its_bytes_and_gives_them_back(tmp_path: Path) -> None:
    file = SlotFile.open(f"{tmp_path}/file", os.O_CREAT)
    file.reserve(0, 1 << 20)
    if not _allocated(tmp_path):
        pytest.skip("this file system cannot reserve blocks")
    assert _allocated(tmp_path) >= 1 << 20
    with pytest.raises(OSError, match="large") as caught:
        file.reserve(0, 1 << 62)
    assert caught.value.errno == errno.EFBIG
    file.give_back(0, 1 << 19)
    assert _allocated(tmp_path) < 1 << 20
    assert (tmp_path / "file").stat().st_size == 1 << 20


def _allocated(directory: Path) -> int:
    return (directory / "file").stat().st_blocks * 512


def test_what_is_no_file_cannot_reserve() -> None:
    read_end, write_end = os.pipe()
    file = SlotFile(write_end)
    with pytest.raises(OSError, match="seek"):
        file.reserve(0, 4096)
    with pytest.raises(OSError, match="seek"):
        file.give_back(0, 4096)
    os.close(read_end)


def test_a_slot_that_the_page_cache_has_is_written_over_rightly(tier: DiskTier) -> None:
    _put(tier, key(1))
    place = place_of(tier, key(1))
    place[0].read_bytes()  # now it is in the page cache
    tier.delete(keys(1))
    _put(tier, key(2))
    assert place_of(tier, key(2)) == place
    assert _get(tier, key(2)) is GetOutcome.OK
    content = place[0].read_bytes()[place[1] :][:CHUNK_BYTES]
    assert content == payload(key(2), CHUNK_BYTES)


def test_other_threads_stay_past_the_page_cache(tier: DiskTier, direct_calls: list[bool]) -> None:
    """One call that needs the page cache does not switch the file for all."""
    _put(tier, key(1), misaligned_by=17)
    _put(tier, key(2))
    assert direct_calls == [True, False, True]


def test_memory_that_is_not_aligned_is_written_by_the_page_cache(
    tier: DiskTier, direct_calls: list[bool]
) -> None:
    assert _put(tier, key(1), misaligned_by=17) is PutOutcome.STORED
    assert direct_calls == [True, False]
    assert _get(tier, key(1)) is GetOutcome.OK
