"""A process killed at any step of a put: what was there stays, what is new is whole or absent."""

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from cacheengine import tiers
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys, payload

CHUNK_BYTES = 64 * 1024
_TIERS = str(Path(tiers.__file__).parent)
_MOST_STEPS = 2000


def _open(root: Path) -> DiskTier:
    return DiskTier(
        [root], "f" * 32, payload_bytes=CHUNK_BYTES, capacity_bytes=2 * (CHUNK_BYTES + 4096)
    )


def _payload(chunk: bytes) -> memoryview:
    return memoryview(payload(chunk, CHUNK_BYTES))


def _die_at(step: int) -> Any:
    """Return a trace function that kills the process before the step-th line of a tier's code."""
    left = iter(range(step))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_TIERS):
            return None
        if event == "line" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def _write_in_halves(fd: int, buffers: Any, offset: int, *, write: Any = os.pwritev) -> int:
    """Write as a kernel may: less than asked, so that a step falls between."""
    first = memoryview(buffers[0]).cast("B")
    written: int = write(fd, [first[: max(1, len(first) // 2)]], offset)
    return written


def _replace_one(root: Path, step: int) -> NoReturn:
    """In a process of its own: the first chunk goes, a third comes."""
    status = 1
    try:
        tier = _open(root)
        tier.scan()
        setattr(os, "pwritev", _write_in_halves)  # noqa: B010  (the types differ)
        sys.settrace(_die_at(step))
        tier.delete(keys(1))
        stored = tier.put(key(3), _payload(key(3))) is PutOutcome.STORED
        sys.settrace(None)
        status = 0 if stored else 2
    finally:
        os._exit(status)


@pytest.mark.slow
def test_killed_at_any_step_of_a_put(tmp_path: Path) -> None:
    start = tmp_path / "start"
    tier = _open(start)
    for chunk in keys(1, 2):
        assert tier.put(chunk, _payload(chunk)) is PutOutcome.STORED
    tier.close()
    seen = set()
    for step in count():
        assert step < _MOST_STEPS, "a put does not take so many steps"
        root = tmp_path / "now"
        shutil.copytree(start, root)
        child = os.fork()
        if child == 0:
            _replace_one(root, step)
        _, status = os.waitpid(child, 0)
        found = _what_is_left(root)
        assert key(2) in found
        assert found <= {*keys(1, 2, 3)}
        seen.add(frozenset(found))
        shutil.rmtree(root)
        if os.WIFEXITED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            assert found == {*keys(2, 3)}
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    # Before the first is gone, between, and when the third is there.
    assert seen == {frozenset(keys(1, 2)), frozenset(keys(2)), frozenset(keys(2, 3))}


def _what_is_left(root: Path) -> set[bytes]:
    """Return the chunks that the next process serves, each read and compared."""
    tier = _open(root)
    found = tier.scan()
    for chunk in found:
        buffer = bytearray(CHUNK_BYTES)
        assert tier.get(chunk, memoryview(buffer)) is GetOutcome.OK
        assert buffer == _payload(chunk)
    files = [each for each in tier.directories[0].rglob("*") if each.is_file()]
    assert sum(each.stat().st_size for each in files) <= tier.capacity_bytes
    assert {each.suffix for each in files} <= {".kv", ""}, "a leftover"
    tier.close()
    return set(found)
