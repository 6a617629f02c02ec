"""Weights told apart by their files."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from cacheengine.identity import kv_versions
from cacheengine.identity.kv_versions import WeightFiles

BIG = 2 << 20


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own; the path is the file of kept digests."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "warmroute" / "weights.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(BIG))
    (tmp_path / "model.safetensors.index.json").write_bytes(b" " * BIG)
    return tmp_path


def test_a_model_that_stays_has_one_digest(model: Path) -> None:
    assert WeightFiles(model).digest() == WeightFiles(model).digest()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_configuration_and_index_count_by_their_content(model: Path, file: str) -> None:
    before = WeightFiles(model).digest()
    times = (model / file).stat()
    content = bytearray((model / file).read_bytes())
    content[-1] ^= 1
    (model / file).write_bytes(content)
    os.utime(model / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert WeightFiles(model).digest() != before


@pytest.mark.parametrize("offset", [0, 4096, BIG // 2 + 1, BIG - 1])
def test_each_byte_of_the_weights_counts(model: Path, offset: int) -> None:
    """Images and builds give all files one time, and a fine-tune may change a few layers only."""
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    before = WeightFiles(model).digest()
    content = bytearray(BIG)
    content[offset] = 1
    weights.write_bytes(content)
    os.utime(weights, ns=(0, 0))
    assert WeightFiles(model).digest() != before


def test_a_copy_is_the_same_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copied = shutil.copytree(
        model, tmp_path_factory.mktemp("there") / "model", copy_function=shutil.copyfile
    )
    assert WeightFiles(Path(copied)).digest() == WeightFiles(model).digest()


def test_a_digest_is_kept_while_the_file_stays(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_versions, "_SETTLED_NS", 0)
    first = WeightFiles(model).digest()
    text = kept.read_text()
    assert WeightFiles(model).digest() == first
    assert kept.read_text() == text
    # What is kept is what counts: the file is not read again.
    kept.write_text(text.replace(text[-10:], '000000"}'))
    assert WeightFiles(model).digest() != first
    kept.write_text(text[: len(text) // 2])  # cut off
    assert WeightFiles(model).digest() == first
    times = (model / "model.safetensors").stat()
    with (model / "model.safetensors").open("r+b") as file:
        file.write(b"1")
    os.utime(model / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert WeightFiles(model).digest() != first


def test_the_digest_of_a_file_that_has_just_changed_is_not_kept(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer than that from the change to here.
    monkeypatch.setattr(kv_versions, "_SETTLED_NS", 3600 * kv_versions._SETTLED_NS)
    WeightFiles(model).digest()
    assert not kept.exists()


def test_one_file_is_a_model_too(model: Path) -> None:
    assert WeightFiles(model / "config.json").digest() != WeightFiles(model).digest()


def test_a_change_of_time_alone_is_a_change_of_state(model: Path) -> None:
    files = WeightFiles(model)
    before = files.states()
    assert before == files.states()
    os.utime(model / "config.json", ns=(0, 0))
    assert files.states() != before
    assert files.changed_since((model / "config.json").stat().st_ctime - 1)
    assert not files.changed_since((model / "config.json").stat().st_ctime + 1)


def snapshot(cache: Path, revision: str, content: bytes = b"{}") -> WeightFiles:
    """Make a snapshot as a hub's cache has it: a small file, and a large one."""
    repository = cache / "models--org--name"
    path = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True)
    names = {
        "config.json": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        "model.safetensors": hashlib.sha256(content).hexdigest(),
    }
    for file, name in names.items():
        blob = repository / "blobs" / name
        blob.write_bytes(content)
        (path / file).symlink_to(blob)
    return WeightFiles(path)


def test_a_hubs_snapshot_has_its_revision_wherever_it_lies(tmp_path: Path) -> None:
    here, there = snapshot(tmp_path / "here", "a1"), snapshot(tmp_path / "there", "a1")
    assert here.hub_name == "org/name"
    assert here.digest() == there.digest() == "org/name@a1"
    assert snapshot(tmp_path / "here", "b2", b"{ }").digest() == "org/name@b2"
    assert not here.changed_since(0)


FILES = ["config.json", "model.safetensors"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_file_written_through_its_link_counts(
    tmp_path: Path, file: str, keeps_time: bool
) -> None:
    """`torch.save` and `cp` follow the link; `cp -p` sets the time of its source, too."""
    files = snapshot(tmp_path, "a1")
    link = files.path / file
    # The kernel's clock of files has ticks of some milliseconds.
    while link.stat().st_ctime_ns <= link.lstat().st_ctime_ns:
        link.write_bytes(b"[]")
    if keeps_time:
        os.utime(link, ns=(0, 0))
    changed = files.digest()
    assert changed.startswith("org/name@a1+")
    assert files.changed_since(0)
    link.write_bytes(b"()")
    assert files.digest() not in (changed, "org/name@a1")


@pytest.mark.parametrize("file", FILES)
def test_a_blob_that_only_looks_changed_is_the_hubs(tmp_path: Path, file: str) -> None:
    """Copies write links and blobs in any order."""
    files = snapshot(tmp_path, "a1")
    link = files.path / file
    while link.stat().st_ctime_ns <= link.lstat().st_ctime_ns:
        link.touch()
    assert files.digest() == "org/name@a1"
    assert not files.changed_since(0)


def test_a_file_put_into_a_snapshot_by_hand_counts(tmp_path: Path) -> None:
    files = snapshot(tmp_path, "a1")
    (files.path / "config.json").unlink()
    (files.path / "config.json").write_text("{ }")
    assert files.digest().startswith("org/name@a1+")
    assert files.changed_since(0)
