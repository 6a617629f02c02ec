"""Layouts: equal fingerprints exactly for interchangeable chunks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cacheengine.identity import ChunkLayout, weights_fingerprint
from tests.cacheengine.building import layout


def test_equal_layouts_have_equal_fingerprints() -> None:
    assert layout().fingerprint() == layout().fingerprint()
    assert len(bytes.fromhex(layout().fingerprint())) == 16


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ChunkLayout)])
def test_every_field_changes_the_fingerprint(name: str) -> None:
    value = getattr(layout(), name)
    other: Any = value * 2 if isinstance(value, int) else value + "x"
    if name == "block_tokens":
        other = value // 2
    change: dict[str, Any] = {name: other}
    changed = dataclasses.replace(layout(), **change)
    assert changed.fingerprint() != layout().fingerprint()


def test_refuses_chunks_that_are_not_whole_blocks() -> None:
    with pytest.raises(ValueError, match="multiple"):
        dataclasses.replace(layout(), chunk_tokens=250)


def test_weights_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    model = tmp_path
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"a" * (2 << 20))
    before = weights_fingerprint(str(model))
    assert before == weights_fingerprint(str(model))
    (model / "config.json").write_text("{ }")
    after_config = weights_fingerprint(str(model))
    (model / "model.safetensors").write_bytes(b"b" * (2 << 20))
    assert len({before, after_config, weights_fingerprint(str(model))}) == 3


def test_a_name_on_a_hub_has_no_identity_of_its_own() -> None:
    assert weights_fingerprint("organization/model") == ""
