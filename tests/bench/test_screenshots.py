"""The command that makes the pictures of the page and of `warmroute top`."""

import asyncio
import sys
from pathlib import Path

import pytest

from bench.screenshots import program
from tests.servers import missing

PAGES = ("ui", "ui-dark", "ui-narrow", "ui-request", "ui-explain", "top")
PICTURES = {f"{name}.png" for name in PAGES}


@pytest.mark.slow
async def test_all_pictures_are_made(tmp_path: Path) -> None:
    if program() is None:
        missing("chromium")
    command = (sys.executable, "-m", "bench.screenshots", "--seconds=2", f"--directory={tmp_path}")
    made = await asyncio.create_subprocess_exec(*command)
    assert await made.wait() == 0
    pictures = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert set(pictures) == PICTURES
    assert all(each.startswith(b"\x89PNG") for each in pictures.values())
