"""Several paths under one disk tier: each takes its share, and fails alone."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers import chunk_file
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.disk_space import DirectoryInUseError
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, key, keys, payload
from tests.cacheengine.tiers.disk_chunks import FINGERPRINT, bytes_under, open_disk, put

MANY = keys(*range(40))


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def tier(roots: list[Path]) -> Iterator[DiskTier]:
    disk = open_disk(*roots)
    disk.scan()
    yield disk
    disk.close()


def _put_all(tier: DiskTier, chunks: list[bytes]) -> set[PutOutcome]:
    return set(tier.put_many([(chunk, memoryview(payload(chunk))) for chunk in chunks]))


def _get_all(tier: DiskTier, chunks: list[bytes]) -> list[GetOutcome]:
    buffers = [bytearray(CHUNK_BYTES) for _ in chunks]
    outcomes = tier.get_many(
        [(chunk, memoryview(buffer)) for chunk, buffer in zip(chunks, buffers, strict=True)]
    )
    for chunk, outcome, buffer in zip(chunks, outcomes, buffers, strict=True):
        assert outcome is not GetOutcome.OK or buffer == payload(chunk)
    return outcomes


def _files(root: Path) -> list[Path]:
    return list(root.rglob("*.kv"))


def _fail_under(root: Path, number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `os` as it is when a path's disk has gone bad."""

    def fail(path: "os.PathLike[str] | str", *args: object, **options: object) -> Any:
        if Path(path).is_relative_to(root):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real(path, *args, **options)

    return fail


def test_chunks_are_spread_and_found(tier: DiskTier, roots: list[Path]) -> None:
    assert _put_all(tier, MANY) == {PutOutcome.STORED}
    shares = [len(_files(root)) for root in roots]
    assert sum(shares) == len(MANY)
    assert min(shares) >= len(MANY) // 4
    assert all(tier.path(chunk).exists() for chunk in MANY)
    assert _get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    tier.delete(MANY)
    assert [_files(root) for root in roots] == [[], []]
    assert set(_get_all(tier, MANY)) == {GetOutcome.MISSING}


def test_the_order_of_use_is_kept_over_all_paths(tier: DiskTier, roots: list[Path]) -> None:
    _put_all(tier, MANY)
    for age_s, chunk in enumerate(MANY):
        os.utime(tier.path(chunk), (1000 - age_s, 1000 - age_s))
    tier.close()
    again = open_disk(*roots)
    assert again.scan() == MANY[::-1]
    again.close()


def test_paths_may_come_and_go_and_change_places(tier: DiskTier, roots: list[Path]) -> None:
    _put_all(tier, MANY)
    in_first = {file.stem for file in _files(roots[0])}
    tier.close()
    turned = open_disk(roots[1], roots[0])
    assert set(turned.scan()) == set(MANY)
    assert [turned.path(chunk).exists() for chunk in MANY] == [True] * len(MANY)
    turned.close()
    more = open_disk(*roots, roots[0].parent / "c")
    assert set(more.scan()) == set(MANY)
    assert _get_all(more, MANY) == [GetOutcome.OK] * len(MANY)
    assert _put_all(more, MANY) == {PutOutcome.STORED}
    # Now some have moved to the path that came, and are nowhere else.
    assert sum(len(_files(root)) for root in more.directories) == len(MANY)
    more.close()
    one = open_disk(roots[0])
    assert {chunk.hex() for chunk in one.scan()} <= in_first
    one.close()


def test_the_same_path_twice_is_one(roots: list[Path]) -> None:
    roots[0].mkdir()
    link = roots[0].parent / "link"
    link.symlink_to(roots[0])
    tier = open_disk(roots[0], link, roots[0])
    assert len(tier.directories) == 1
    tier.close()


def test_every_path_is_locked_and_freed_when_one_is_taken(
    tier: DiskTier, roots: list[Path]
) -> None:
    other = roots[0].parent / "c"
    with pytest.raises(DirectoryInUseError):
        open_disk(other, roots[1])
    open_disk(other).close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_path_that_cannot_be_used_at_start_is_left_out(
    roots: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    number: int,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _fail_under(roots[0], number, getattr(os, call)))
        tier = open_disk(*roots)
        assert tier.scan() == []
        assert _put_all(tier, MANY) == {PutOutcome.STORED}
        assert _get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
        tier.close()
        (warning,) = caplog.messages
        assert str(roots[0]) in warning
        assert os.strerror(number) in warning
        with pytest.raises(OSError, match=os.strerror(number)):
            open_disk(roots[0])
    again = open_disk(*roots)
    assert {*again.scan()} == {*MANY}
    again.close()


def test_a_subdirectory_that_cannot_be_listed_costs_its_own_chunks(
    tier: DiskTier,
    roots: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _put_all(tier, MANY)
    tier.close()
    broken = [tier.path(chunk).parent for chunk in MANY[:2]]
    for directory in broken:
        monkeypatch.setattr(os, "scandir", _fail_under(directory, errno.EIO, os.scandir))
    again = open_disk(*roots)
    assert {*again.scan()} == {chunk for chunk in MANY if tier.path(chunk).parent not in broken}
    again.close()
    assert len(caplog.messages) <= len(roots)
    assert os.strerror(errno.EIO) in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_path_that_fails_costs_its_own_chunks_only(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _put_all(tier, MANY)
    lost = {bytes.fromhex(file.stem) for file in _files(roots[0])}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_under(roots[0], number, os.open))
        outcomes = dict(zip(MANY, _get_all(tier, MANY), strict=True))
        assert {chunk for chunk in MANY if outcomes[chunk] is GetOutcome.OK} == set(MANY) - lost
        assert {outcomes[chunk] for chunk in lost} == {GetOutcome.FAILED}
        # What comes now goes to the other path, whatever its key.
        new = keys(*range(100, 120))
        assert _put_all(tier, new) == {PutOutcome.STORED}
        assert _get_all(tier, new) == [GetOutcome.OK] * len(new)
    assert _get_all(tier, MANY + new) == [GetOutcome.OK] * len(MANY + new)


def test_a_path_that_is_full_leaves_the_rest_to_the_other(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _fail_under(roots[0], errno.ENOSPC, os.open))
        assert _put_all(tier, MANY) == {PutOutcome.STORED}
        assert _files(roots[0]) == []
        patch.setattr(os, "open", _fail_under(roots[0].parent, errno.ENOSPC, os.open))
        assert put(tier, key(100)) is PutOutcome.NO_SPACE
    assert _get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    assert tier.used_bytes == bytes_under(*roots)


def test_a_path_that_is_removed_is_made_again_and_ours_again(
    tier: DiskTier, roots: list[Path]
) -> None:
    _put_all(tier, MANY)
    lost = len(_files(roots[0]))
    shutil.rmtree(roots[0])
    assert _get_all(tier, MANY).count(GetOutcome.MISSING) == lost
    assert _put_all(tier, MANY) == {PutOutcome.STORED}
    assert len(_files(roots[0])) == lost
    assert _get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    with pytest.raises(DirectoryInUseError):
        open_disk(roots[0])


def test_a_path_removed_and_taken_by_another_is_left_to_it(
    tier: DiskTier, roots: list[Path]
) -> None:
    shutil.rmtree(roots[0])
    thief = open_disk(roots[0])
    assert _put_all(tier, MANY) == {PutOutcome.STORED}
    assert thief.scan() == []
    thief.close()


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """Be somebody whom permissions bind, and have a directory."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        before = os.geteuid()
        if before == 0:
            os.chown(directory, 65534, 65534)
            os.seteuid(65534)
        try:
            yield directory
        finally:
            os.seteuid(before)


def test_permission_that_is_really_lost(ordinary_user: Path) -> None:
    roots = [ordinary_user / "a", ordinary_user / "b"]
    tier = open_disk(*roots)
    _put_all(tier, MANY)
    roots[0].chmod(0)
    try:
        new = keys(*range(100, 120))
        assert _put_all(tier, new) == {PutOutcome.STORED}
        assert _get_all(tier, new) == [GetOutcome.OK] * len(new)
        assert set(_get_all(tier, MANY)) == {GetOutcome.OK, GetOutcome.FAILED}
        assert tier.used_bytes == len(MANY + new) * tier.item_bytes
        tier.delete(MANY)
    finally:
        roots[0].chmod(0o755)
    # What could not be removed is, little by little, now that it can be.
    for number in range(200, 240):
        assert put(tier, key(number)) is PutOutcome.STORED
    assert {bytes.fromhex(file.stem) for root in roots for file in _files(root)} == {
        *new,
        *keys(*range(200, 240)),
    }
    tier.close()


def test_a_chunk_in_two_places_is_kept_once(tier: DiskTier, roots: list[Path]) -> None:
    """It was written elsewhere while its own path was failing, and then that came back."""
    _put_all(tier, MANY)
    stale = tier.path(key(1))
    (other,) = (root for root in roots if not stale.is_relative_to(root))
    copy = other / stale.relative_to(stale.parent.parent.parent)
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(stale, copy)
    os.utime(stale, (1, 1))
    tier.close()
    again = open_disk(*roots)
    assert sorted(again.scan()) == sorted(MANY)
    assert copy.exists()
    assert not stale.exists()
    assert again.used_bytes == bytes_under(*roots) == len(MANY) * again.item_bytes
    again.close()


def test_a_chunk_stored_again_elsewhere_is_not_left_behind(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, key(1))
    with monkeypatch.context() as patch:
        home = tier.path(key(1))
        (root,) = (root for root in roots if home.is_relative_to(root))
        patch.setattr(os, "open", _fail_under(root, errno.EIO, os.open))
        assert put(tier, key(1)) is PutOutcome.STORED
    assert not home.exists()
    assert sum(len(_files(root)) for root in roots) == 1


# --- others on the machine ---


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_and_directories_are_its_user_s_alone(roots: list[Path]) -> None:
    """Whatever the umask; also a directory that an earlier version has left open."""
    before = os.umask(0)
    try:
        directory = roots[0] / FINGERPRINT
        directory.mkdir(parents=True)
        assert _mode(directory) == 0o777
        with contextlib.closing(open_disk(*roots)) as tier:
            _put_all(tier, MANY)
            made = [each for root in roots for each in root.rglob("*")]
            assert {_mode(each) for each in made if each.is_dir()} == {0o700}
            assert {_mode(each) for each in made if each.is_file()} == {0o600}
            assert any(each.suffix == ".kv" for each in made)
    finally:
        os.umask(before)


def test_a_link_in_the_place_of_the_probe_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".probe").symlink_to(victim)
    chunk_file.why_not_direct(tmp_path)
    assert victim.read_text() == "mine"
    assert not (tmp_path / ".probe").is_symlink()


def test_links_in_the_place_of_chunks_are_not_followed(roots: list[Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with contextlib.closing(open_disk(roots[0])) as tier:
        assert _put_all(tier, MANY[:1]) == {PutOutcome.STORED}
        (file,) = _files(roots[0])
        whole = tmp_path / "whole"
        file.rename(whole)
        file.symlink_to(whole)
        assert _get_all(tier, MANY[:1]) == [GetOutcome.FAILED]
    assert whole.exists()
    assert victim.read_text() == "mine"


def test_a_link_in_the_place_of_the_lock_is_refused(roots: list[Path], tmp_path: Path) -> None:
    directory = roots[0] / FINGERPRINT
    directory.mkdir(parents=True)
    (directory / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_disk(roots[0])
    assert not (tmp_path / "elsewhere").exists()
