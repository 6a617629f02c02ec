"""The disk tier's limit: kept to the byte, whatever is removed, fails or is left behind."""

import errno
import itertools
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.slot_file import SlotFile
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys
from tests.cacheengine.tiers.disk_chunks import (
    ITEM_BYTES,
    bytes_under,
    flip,
    get,
    get_all,
    leave_unsaved,
    open_disk,
    place_of,
    put,
    put_all,
)
from tests.stored_chunks import stored_chunks

OURS, THEIRS = "a" * 32, "b" * 32


def _open(root: Path, fingerprint: str = OURS, *, chunks: int = 4) -> DiskTier:
    return open_disk(root, fingerprint=fingerprint, chunks=chunks)


def _leave_theirs(root: Path, chunks: list[bytes]) -> None:
    """Store chunks of another layout, and end its tier."""
    theirs = _open(root, THEIRS)
    theirs.scan()
    put_all(theirs, chunks)
    theirs.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    disk = _open(tmp_path)
    disk.scan()
    yield disk
    disk.close()


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets blocks for one chunk at a time."""
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 1)


def test_what_was_removed_makes_room_in_its_slot(tier: DiskTier, tmp_path: Path) -> None:
    put_all(tier, keys(1, 2, 3, 4))
    places = {place_of(tier, chunk) for chunk in keys(1, 2, 3, 4)}
    assert put(tier, key(5)) is PutOutcome.NO_SPACE
    tier.delete(keys(1, 2))
    assert get_all(tier, keys(1, 2)) == [GetOutcome.MISSING] * 2
    assert put_all(tier, keys(5, 6)) == [PutOutcome.STORED] * 2
    assert {place_of(tier, chunk) for chunk in keys(3, 4, 5, 6)} == places
    assert get_all(tier, keys(3, 4, 5, 6)) == [GetOutcome.OK] * 4
    assert bytes_under(tmp_path) == tier.used_bytes == tier.capacity_bytes


def test_of_a_batch_that_does_not_fit_some_is_stored(tier: DiskTier) -> None:
    outcomes = put_all(tier, keys(*range(6)))
    assert outcomes == [PutOutcome.STORED] * 4 + [PutOutcome.NO_SPACE] * 2
    assert get_all(tier, keys(*range(4))) == [GetOutcome.OK] * 4


def test_a_full_tier_replaces_a_chunk_in_its_slot(tier: DiskTier) -> None:
    """The engine puts a chunk again that could not be read."""
    put_all(tier, keys(1, 2, 3, 4))
    assert put(tier, key(1)) is PutOutcome.STORED
    assert get_all(tier, keys(1, 2, 3, 4)) == [GetOutcome.OK] * 4


def test_a_chunk_put_twice_is_held_once(tier: DiskTier, tmp_path: Path) -> None:
    for _ in range(3):
        put(tier, key(1))
    tier.delete(keys(1))
    assert get(tier, key(1)) is GetOutcome.MISSING
    tier.close()
    assert bytes_under(tmp_path) == 0


def test_files_grow_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 10 * ITEM_BYTES)
    monkeypatch.setattr("cacheengine.tiers.disk_path._FILES", 2)
    tier = _open(tmp_path, chunks=25)
    tier.scan()
    taken = []
    for number in range(25):
        assert put(tier, key(number)) is PutOutcome.STORED
        assert tier.used_bytes == bytes_under(tmp_path)
        taken.append(tier.used_bytes // ITEM_BYTES)
    assert taken == [10] * 10 + [20] * 10 + [25] * 5
    tier.close()


def test_free_slots_are_few_and_gone_at_the_end(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, chunks=20_000)
    tier.scan()
    for start in range(0, 12_000, 400):
        put_all(tier, keys(*range(start, start + 400)))
    tier.delete(keys(*range(12_000)))
    assert bytes_under(tmp_path) == tier.used_bytes <= 65 * 1024 * 1024
    tier.close()
    assert [*tmp_path.rglob("*.kv")] == []


@pytest.mark.usefixtures("small_portions")
def test_holes_are_filled_again(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, chunks=1000)
    tier.scan()
    most_free = 16
    chunks = keys(*range(900))
    put_all(tier, chunks[:450])
    put_all(tier, chunks[450:])
    tier.delete(chunks[::-1])
    assert tier.used_bytes == bytes_under(tmp_path) == most_free * ITEM_BYTES
    for start in range(0, 900, 30):
        assert {*put_all(tier, chunks[start : start + 30])} == {PutOutcome.STORED}
    assert tier.used_bytes == bytes_under(tmp_path) == 900 * ITEM_BYTES
    assert get_all(tier, chunks[:400]) == [GetOutcome.OK] * 400
    tier.close()


def test_a_smaller_limit_gives_space_back(tmp_path: Path) -> None:
    first = _open(tmp_path, chunks=40)
    first.scan()
    put_all(first, keys(*range(40)))
    first.save(keys(*range(40)), is_final=True)
    first.close()
    again = _open(tmp_path, chunks=10)
    found = again.scan()
    again.delete(found[:30])  # as the engine does
    assert bytes_under(tmp_path) == again.used_bytes == again.capacity_bytes
    again.delete(found[30:31])
    assert put(again, key(50)) is PutOutcome.STORED
    assert bytes_under(tmp_path) == again.used_bytes == again.capacity_bytes
    assert get_all(again, found[31:]) == [GetOutcome.OK] * 9
    again.close()


def test_where_holes_cannot_be_made_slots_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: SlotFile, offset: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(SlotFile, "give_back", fail)
    first = _open(tmp_path, chunks=40)
    first.scan()
    put_all(first, keys(*range(40)))
    first.delete(keys(*range(20)))
    first.save(keys(*range(40)), is_final=True)
    first.close()
    again = _open(tmp_path, chunks=40)
    # The seals are read: there are blocks that hold no chunk, and they count.
    assert {*keys(*range(20, 40))} <= {*again.scan()}
    assert again.used_bytes == bytes_under(tmp_path)
    again.delete(keys(*range(20)))
    assert {*put_all(again, keys(*range(100, 120)))} == {PutOutcome.STORED}
    assert bytes_under(tmp_path) == again.used_bytes == again.capacity_bytes
    again.close()


def test_a_disk_with_little_space_is_filled(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portion does not fit, some chunks do; and nothing is written that does not fit."""
    real, left = SlotFile.reserve, [2 * ITEM_BYTES]

    def reserve(file: SlotFile, offset: int, size_bytes: int) -> None:
        if size_bytes > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= size_bytes
        real(file, offset, size_bytes)

    monkeypatch.setattr(SlotFile, "reserve", reserve)
    outcomes = [put(tier, chunk) for chunk in keys(1, 2, 3)]
    assert outcomes == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.NO_SPACE]
    assert tier.used_bytes == 2 * ITEM_BYTES
    left[0] = ITEM_BYTES
    outcomes = put_all(tier, keys(3, 4))
    assert outcomes == [PutOutcome.STORED, PutOutcome.NO_SPACE]
    tier.delete(keys(1))
    assert put(tier, key(5)) is PutOutcome.STORED


def test_a_damaged_chunk_gives_its_space_back(tier: DiskTier, tmp_path: Path) -> None:
    put_all(tier, keys(1, 2, 3, 4))
    flip(place_of(tier, key(2)), 100)
    assert get(tier, key(2)) is GetOutcome.DAMAGED
    assert tier.used_bytes == bytes_under(tmp_path) == 3 * ITEM_BYTES
    assert put(tier, key(5)) is PutOutcome.STORED


# --- other layouts ---


@pytest.mark.usefixtures("small_portions")
def test_other_models_make_room_as_this_one_grows(tmp_path: Path) -> None:
    _leave_theirs(tmp_path, keys(1, 2, 3, 4))
    ours = _open(tmp_path)
    assert ours.scan() == []
    for stored, chunk in enumerate(keys(11, 12, 13, 14), start=1):
        assert put(ours, chunk) is PutOutcome.STORED
        assert bytes_under(tmp_path) == ours.capacity_bytes
        assert bytes_under(tmp_path / THEIRS) == (4 - stored) * ITEM_BYTES
    ours.close()


@pytest.mark.usefixtures("small_portions")
def test_other_models_get_what_this_one_leaves_of_the_limit(tmp_path: Path) -> None:
    """Else every change of model would leave a full disk behind."""
    _leave_theirs(tmp_path, keys(1, 2, 3, 4))
    ours = _open(tmp_path, chunks=2)
    assert ours.scan() == []
    assert bytes_under(tmp_path) == 2 * ITEM_BYTES
    put(ours, key(11))
    ours.close()
    again = _open(tmp_path, chunks=2)
    assert again.scan() == keys(11)
    assert len(stored_chunks(tmp_path / THEIRS)) == 1
    again.close()


def test_what_another_process_took_since_is_not_ours_to_count(tmp_path: Path) -> None:
    _leave_theirs(tmp_path, keys(1, 2, 3, 4))
    ours = _open(tmp_path)
    ours.scan()
    theirs = _open(tmp_path, THEIRS)
    theirs.scan()
    assert put_all(ours, keys(11, 12, 13, 14)) == [PutOutcome.STORED] * 4
    assert get_all(theirs, keys(1, 2, 3, 4)) == [GetOutcome.OK] * 4
    theirs.close()
    ours.close()


@pytest.mark.usefixtures("small_portions")
def test_puts_wait_for_other_models_files_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_theirs(tmp_path, keys(1, 2))
    ours = _open(tmp_path)
    ours.scan()

    def refuse(path: str, *args: object, **options: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        outcomes = [put(ours, chunk) for chunk in keys(11, 12, 13)]
    assert outcomes == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.NO_SPACE]
    assert bytes_under(tmp_path) == ours.capacity_bytes
    ours.close()


def test_chunks_of_earlier_versions_are_removed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They go from all layouts, with one line of log. Files that are not ours stay."""
    for fingerprint in (OURS, THEIRS):
        for number in range(50):
            name = key(number).hex()
            file = tmp_path / fingerprint / name[:2] / f"{name}.kv"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x" * ITEM_BYTES)
        file.with_name(f"{name}.kv.7.tmp").write_bytes(b"x")
        (tmp_path / fingerprint / ".lock").touch()
        (tmp_path / fingerprint / ".index").write_bytes(b"WARMKEYS" + bytes(100))
    foreign = [file.with_name("notes.txt"), file.with_name("xyz.kv")]
    for each in foreign:
        each.write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{name}.kv").touch()
    (tmp_path / OURS / "zz").mkdir()
    (tmp_path / OURS / "00").unlink(missing_ok=True)
    link = next(
        path for number in range(256) if not (path := tmp_path / OURS / f"{number:02x}").exists()
    )
    link.symlink_to(tmp_path / "elsewhere")
    ours = _open(tmp_path)
    with caplog.at_level(logging.INFO):
        assert ours.scan() == []
    assert len(caplog.messages) == 1
    assert "removed 102 chunks in the format of earlier versions" in caplog.messages[0]
    left = [each for each in tmp_path.rglob("*.kv*") if each.is_file()]
    assert {*left} == {foreign[1], tmp_path / "elsewhere" / f"{name}.kv"}
    assert all(each.exists() for each in foreign)
    assert put(ours, key(1)) is PutOutcome.STORED
    ours.close()


# --- everything at once ---


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("paths", [1, 2])
def test_never_a_byte_too_many_nor_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, paths: int
) -> None:
    """An engine that fills the tier, evicts, ends and is killed, while calls fail."""
    generator = random.Random(seed)
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 3 * ITEM_BYTES)
    monkeypatch.setattr("cacheengine.tiers.disk_path._FILES", 2)
    roots = [tmp_path / str(number) for number in range(paths)]
    capacity = 12
    broken: set[str] = set()
    for owner, name in ((os, "pwritev"), (SlotFile, "reserve"), (SlotFile, "give_back")):
        _break(monkeypatch, owner, name, broken)
    held: list[bytes] = []
    tier = open_disk(*roots, chunks=capacity)
    tier.scan()
    numbers = itertools.count()
    stored = 0
    for _ in range(200):
        broken.clear()
        if generator.random() < 0.2:
            broken.add(generator.choice(("pwritev", "reserve", "give_back")))
        step = generator.random()
        if step < 0.05:
            broken.clear()
            if is_orderly := generator.random() < 0.5:
                for path in range(tier.paths):
                    tier.save(held, path, is_final=True)
                tier.close()
            else:
                leave_unsaved(tier)
            tier = open_disk(*roots, chunks=capacity)
            found = tier.scan()
            assert {*found} >= {*held}
            assert not is_orderly or found == held
            # Removed ones may come back after a kill.
            extra = [chunk for chunk in found if chunk not in held]
            assert {*get_all(tier, extra)} <= {GetOutcome.OK, GetOutcome.DAMAGED}
            tier.delete(extra)
        elif step < 0.2 and held:
            tier.delete([held.pop(generator.randrange(len(held)))])
        elif step < 0.25:
            for path in range(tier.paths):
                tier.save(held, path, is_final=False)
        else:
            batch = [key(next(numbers)) for _ in range(generator.randrange(1, 5))]
            while len(held) + len(batch) > capacity:
                tier.delete([held.pop(generator.randrange(len(held)))])
            outcomes = put_all(tier, batch)
            assert broken or {*outcomes} == {PutOutcome.STORED}
            held += [
                chunk
                for chunk, outcome in zip(batch, outcomes, strict=True)
                if outcome is PutOutcome.STORED
            ]
            stored += len(batch)
        assert bytes_under(*roots) <= tier.used_bytes <= tier.capacity_bytes
        assert get_all(tier, held) == [GetOutcome.OK] * len(held)
    assert stored > 100
    tier.close()


def _break(patch: pytest.MonkeyPatch, owner: object, name: str, broken: set[str]) -> None:
    real = getattr(owner, name)

    def call(*args: object, **options: object) -> object:
        if name in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **options)

    patch.setattr(owner, name, call)
