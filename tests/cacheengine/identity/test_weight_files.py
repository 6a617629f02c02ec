"""Weights told apart by their files."""

import os
from pathlib import Path

import pytest

from cacheengine.identity.kv_versions import WeightFiles

BIG = 2 << 20


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


def test_weights_count_by_their_time_and_by_samples(model: Path) -> None:
    weights = model / "model.safetensors"
    digests, times = {WeightFiles(model).digest()}, weights.stat()
    weights.write_bytes(b"\1" * BIG)
    digests.add(WeightFiles(model).digest())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    digests.add(WeightFiles(model).digest())
    os.utime(weights, ns=(0, 0))
    digests.add(WeightFiles(model).digest())
    assert len(digests) == 4


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


def snapshot(cache: Path, revision: str, content: str = "{}") -> WeightFiles:
    """Make a snapshot as a hub's cache has it."""
    repository = cache / "models--org--name"
    blob = repository / "blobs" / f"{revision}-config"
    path = repository / "snapshots" / revision
    blob.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True)
    blob.write_text(content)
    (path / "config.json").symlink_to(blob)
    return WeightFiles(path)


def test_a_hubs_snapshot_has_its_revision_wherever_it_lies(tmp_path: Path) -> None:
    here, there = snapshot(tmp_path / "here", "a1"), snapshot(tmp_path / "there", "a1")
    assert here.hub_name == "org/name"
    assert here.digest() == there.digest() == "org/name@a1"
    assert snapshot(tmp_path / "here", "b2").digest() == "org/name@b2"
    assert not here.changed_since(0)


def test_a_file_put_into_a_snapshot_by_hand_counts(tmp_path: Path) -> None:
    files = snapshot(tmp_path, "a1")
    (files.path / "config.json").unlink()
    (files.path / "config.json").write_text("{ }")
    assert files.digest().startswith("org/name@a1+")
