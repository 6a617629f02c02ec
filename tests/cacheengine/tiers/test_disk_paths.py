"""Several paths under one disk tier: each takes its share, and fails alone."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.layout_directory import DirectoryInUseError
from cacheengine.tiers.slot_file import why_not_direct
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys
from tests.cacheengine.tiers.disk_chunks import (
    FINGERPRINT,
    ITEM_BYTES,
    break_disk,
    bytes_under,
    fail_below,
    get_all,
    held_under,
    leave_unsaved,
    open_disk,
    place_of,
    put,
    put_all,
)

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


def test_chunks_are_spread_and_found(tier: DiskTier, roots: list[Path]) -> None:
    assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
    shares = [len(held_under(tier, root)) for root in roots]
    assert sum(shares) == len(MANY)
    assert min(shares) >= len(MANY) // 4
    assert [held_under(tier, roots[tier.path_of(chunk)]) & {chunk} for chunk in MANY] == [
        {chunk} for chunk in MANY
    ]
    assert get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    tier.delete(MANY)
    assert [held_under(tier, root) for root in roots] == [set(), set()]
    assert {*get_all(tier, MANY)} == {GetOutcome.MISSING}


def test_paths_may_come_and_go_and_change_places(tier: DiskTier, roots: list[Path]) -> None:
    put_all(tier, MANY)
    in_first = held_under(tier, roots[0])
    tier.close()
    turned = open_disk(roots[1], roots[0])
    assert {*turned.scan()} == {*MANY}
    assert held_under(turned, roots[0]) == in_first
    turned.close()
    more = open_disk(*roots, roots[0].parent / "c")
    assert {*more.scan()} == {*MANY}
    assert get_all(more, MANY) == [GetOutcome.OK] * len(MANY)
    assert {*put_all(more, MANY)} == {PutOutcome.STORED}
    # Now some have moved to the path that came, and are nowhere else.
    everywhere = [root.parent for root in more.directories]
    assert sum(len(held_under(more, root)) for root in everywhere) == len(MANY)
    more.close()
    one = open_disk(roots[0])
    assert {*one.scan()} <= in_first
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
        patch.setattr(os, call, fail_below(roots[0], number, getattr(os, call)))
        tier = open_disk(*roots)
        assert tier.scan() == []
        assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
        assert get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
        tier.close()
        (warning,) = caplog.messages
        assert str(roots[0]) in warning
        assert os.strerror(number) in warning
        with pytest.raises(OSError, match=os.strerror(number)):
            open_disk(roots[0])
    again = open_disk(*roots)
    assert {*again.scan()} == {*MANY}
    again.close()


def test_a_file_that_cannot_be_opened_costs_its_own_chunks(
    tier: DiskTier,
    roots: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put_all(tier, MANY)
    lost = held_under(tier, roots[0])
    leave_unsaved(tier)
    (file,) = roots[0].rglob("*.kv")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail_below(file, errno.EIO, os.open))
        again = open_disk(*roots)
        assert {*again.scan()} == {*MANY} - lost
    # What it takes is counted.
    assert again.used_bytes >= bytes_under(*roots)
    assert len(caplog.messages) == 1
    assert os.strerror(errno.EIO) in caplog.text
    assert {*put_all(again, MANY)} == {PutOutcome.STORED}
    assert get_all(again, MANY) == [GetOutcome.OK] * len(MANY)
    again.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_path_that_fails_costs_its_own_chunks_only(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put_all(tier, MANY)
    lost = held_under(tier, roots[0])
    with monkeypatch.context() as patch:
        break_disk(patch, roots[0], number, "open", "preadv", "pwritev")
        outcomes = dict(zip(MANY, get_all(tier, MANY), strict=True))
        assert {chunk for chunk in MANY if outcomes[chunk] is GetOutcome.OK} == {*MANY} - lost
        assert {outcomes[chunk] for chunk in lost} == {GetOutcome.FAILED}
        # What comes now goes to the other path, whatever its key.
        new = keys(*range(100, 120))
        assert {*put_all(tier, new)} == {PutOutcome.STORED}
        assert get_all(tier, new) == [GetOutcome.OK] * len(new)
    assert get_all(tier, MANY + new) == [GetOutcome.OK] * len(MANY + new)


def test_a_path_that_is_full_leaves_the_rest_to_the_other(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_disk(patch, roots[0], errno.ENOSPC, "open", "pwritev")
        assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
        assert held_under(tier, roots[0]) == set()
        break_disk(patch, roots[1], errno.ENOSPC, "open", "pwritev")
        assert put(tier, key(100)) is PutOutcome.NO_SPACE
    assert get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    assert tier.used_bytes == bytes_under(*roots)


def test_free_slots_of_one_path_are_used_when_the_other_may_not_grow(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "a", tmp_path / "b", chunks=len(MANY))
    tier.scan()
    assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
    mine = held_under(tier, tmp_path / "a")
    tier.delete(mine)
    numbers = (key(number) for number in range(1000, 2000))
    others = [chunk for chunk in numbers if tier.path_of(chunk) == 1][: len(mine)]
    assert {*put_all(tier, others)} == {PutOutcome.STORED}
    assert get_all(tier, others) == [GetOutcome.OK] * len(others)
    assert tier.used_bytes == bytes_under(tmp_path) == len(MANY) * ITEM_BYTES
    tier.close()


def test_a_path_that_is_removed_is_made_again_and_ours_again(
    tier: DiskTier, roots: list[Path]
) -> None:
    put_all(tier, MANY)
    lost = len(held_under(tier, roots[0]))
    shutil.rmtree(roots[0])
    assert get_all(tier, MANY).count(GetOutcome.MISSING) == lost
    assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
    assert len(held_under(tier, roots[0])) == lost
    assert get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
    with pytest.raises(DirectoryInUseError):
        open_disk(roots[0])


def test_a_path_removed_and_taken_by_another_is_left_to_it(
    tier: DiskTier, roots: list[Path]
) -> None:
    shutil.rmtree(roots[0])
    thief = open_disk(roots[0])
    assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
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
    """Files that are open stay open; new ones cannot be made."""
    roots = [ordinary_user / "a", ordinary_user / "b"]
    tier = open_disk(*roots)
    tier.scan()
    (chunk, *_) = (each for each in MANY if tier.path_of(each) == 1)
    assert put(tier, chunk) is PutOutcome.STORED
    roots[0].chmod(0)
    try:
        assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
        assert get_all(tier, MANY) == [GetOutcome.OK] * len(MANY)
        assert held_under(tier, roots[0]) == set()
    finally:
        roots[0].chmod(0o755)
    assert {*put_all(tier, MANY)} == {PutOutcome.STORED}
    assert held_under(tier, roots[0]) != set()
    tier.close()


def test_a_chunk_in_two_places_is_kept_once(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written elsewhere while its own path was failing, and then that came back."""
    put_all(tier, MANY)
    for path in range(2):
        tier.save(MANY, path, is_final=True)
    tier.close()
    other = open_disk(roots[1])
    other.scan()
    put_all(other, MANY)
    leave_unsaved(other)
    again = open_disk(*roots)
    assert sorted(again.scan()) == sorted(MANY)
    assert held_under(again, roots[1]) == {*MANY}
    assert held_under(again, roots[0]) == set()
    assert get_all(again, MANY) == [GetOutcome.OK] * len(MANY)
    again.close()
    assert bytes_under(*roots) == len(MANY) * ITEM_BYTES


def test_a_chunk_stored_again_elsewhere_is_not_left_behind(
    tier: DiskTier, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, key(1))
    home = roots[tier.path_of(key(1))]
    with monkeypatch.context() as patch:
        break_disk(patch, home, errno.EIO, "open", "pwritev")
        assert put(tier, key(1)) is PutOutcome.STORED
    assert not place_of(tier, key(1))[0].is_relative_to(home)
    assert held_under(tier, home) == set()


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
            put_all(tier, MANY)
            made = [each for root in roots for each in root.rglob("*")]
            assert {_mode(each) for each in made if each.is_dir()} == {0o700}
            assert {_mode(each) for each in made if each.is_file()} == {0o600}
            tier.save(MANY, 0, is_final=True)
            assert {each.name for each in made} >= {"00.kv", ".lock"}
            assert _mode(directory / ".index") == 0o600
    finally:
        os.umask(before)


def test_a_link_in_the_place_of_the_probe_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".probe").symlink_to(victim)
    why_not_direct(tmp_path)
    assert victim.read_text() == "mine"
    assert not (tmp_path / ".probe").is_symlink()


def test_links_in_the_place_of_files_are_not_followed(roots: list[Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with contextlib.closing(open_disk(roots[0])) as tier:
        tier.scan()
        for name in ("00.kv", ".index.tmp"):
            (tier.directories[0] / name).symlink_to(victim)
        assert {*put_all(tier, MANY[:1])} == {PutOutcome.FAILED}
        tier.save([], 0, is_final=True)
    with contextlib.closing(open_disk(roots[0])) as tier:
        assert tier.scan() == []
    assert victim.read_text() == "mine"


def test_a_link_in_the_place_of_the_lock_is_refused(roots: list[Path], tmp_path: Path) -> None:
    directory = roots[0] / FINGERPRINT
    directory.mkdir(parents=True)
    (directory / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_disk(roots[0])
    assert not (tmp_path / "elsewhere").exists()
