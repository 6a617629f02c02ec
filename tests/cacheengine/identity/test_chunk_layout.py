"""Layouts: equal fingerprints exactly for interchangeable chunks."""

import dataclasses
from typing import Any

import pytest

from cacheengine.identity.chunk_layout import ChunkLayout
from tests.cacheengine.helpers import layout


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
