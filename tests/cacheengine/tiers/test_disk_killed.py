"""A process killed at any moment: what was there stays, what is new is whole or absent."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from cacheengine import tiers
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys, payload
from tests.cacheengine.tiers.disk_chunks import bytes_under

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
    tier.scan()
    for chunk in keys(1, 2):
        assert tier.put(chunk, _payload(chunk)) is PutOutcome.STORED
    tier.save(keys(1, 2), is_final=True)
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
    # The first comes back until its slot is written again; then there is nothing; then the third.
    assert seen == {frozenset(keys(1, 2)), frozenset(keys(2)), frozenset(keys(2, 3))}


def _what_is_left(root: Path) -> set[bytes]:
    """Return the chunks that the next process serves, each read and compared."""
    tier = _open(root)
    found = tier.scan()
    served = set()
    for chunk in found:
        buffer = bytearray(CHUNK_BYTES)
        outcome = tier.get(chunk, memoryview(buffer))
        # The slot of the first may be written in part, with its former seal.
        assert outcome is GetOutcome.OK or (chunk, outcome) == (key(1), GetOutcome.DAMAGED)
        if outcome is GetOutcome.OK:
            assert buffer == _payload(chunk)
            served.add(chunk)
    assert bytes_under(root, item_bytes=tier.item_bytes) == tier.used_bytes <= tier.capacity_bytes
    assert {each.name for each in tier.directories[0].iterdir()} <= {"00.kv", ".lock", ".index"}
    tier.close()
    return served


_WRITER = """
import sys
from pathlib import Path
from tests.cacheengine.tiers.test_disk_killed import write_for_ever
write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
"""
_SMALL_BYTES = 16384
_CAPACITY = 200


def open_small(root: Path) -> DiskTier:
    """A tier of small chunks on two paths."""
    roots = [root / "a", root / "b"]
    capacity_bytes = _CAPACITY * (_SMALL_BYTES + 4096)
    return DiskTier(roots, "f" * 32, _SMALL_BYTES, capacity_bytes, lock_wait_s=10.0)


def write_for_ever(root: Path, seed: int) -> None:
    """In a process of its own: put and remove by some threads, and report each on stdout.

    "+" after a put, "-" before a removal, in one call each.
    """
    tier = open_small(root)
    os.write(1, b"".join(b"=" + chunk.hex().encode() + b"\n" for chunk in tier.scan()))
    numbers = count(seed * 1_000_000)

    def work(number: int) -> None:
        generator = random.Random(f"{seed} {number}")
        mine: list[bytes] = []
        while True:
            while len(mine) > _CAPACITY // 8:
                gone = [mine.pop(generator.randrange(len(mine))) for _ in range(8)]
                os.write(1, b"".join(b"-" + chunk.hex().encode() + b"\n" for chunk in gone))
                tier.delete(gone)
            batch = [key(next(numbers)) for _ in range(generator.randrange(1, 12))]
            payloads = [memoryview(payload(chunk, _SMALL_BYTES)) for chunk in batch]
            outcomes = tier.put_many([*zip(batch, payloads, strict=True)])
            stored = [
                chunk
                for chunk, outcome in zip(batch, outcomes, strict=True)
                if outcome is PutOutcome.STORED
            ]
            os.write(1, b"".join(b"+" + chunk.hex().encode() + b"\n" for chunk in stored))
            mine += stored

    for number in range(4):
        threading.Thread(target=work, args=(number,)).start()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A stored chunk is there with its bytes. A chunk that was cut short is absent or damaged."""
    generator = random.Random(7)
    for seed in range(8):
        arguments = [sys.executable, "-c", _WRITER, os.fspath(tmp_path), str(seed)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(generator.randrange(200, 1500))]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        # Removed ones of the run before may have come back, and may be evicted here.
        held = {line[1:] for line in lines if line.startswith(b"+") and line.endswith(b"\n")}
        held -= {line[1:] for line in lines if line.startswith(b"-")}
        expected = {bytes.fromhex(line.decode()) for line in held}
        tier = open_small(tmp_path)
        found = tier.scan()
        assert {*found} >= expected
        damaged = 0
        for chunk in found:
            buffer = bytearray(_SMALL_BYTES)
            outcome = tier.get(chunk, memoryview(buffer))
            damaged += outcome is GetOutcome.DAMAGED
            assert outcome is GetOutcome.OK or chunk not in expected
            assert outcome is GetOutcome.DAMAGED or buffer == payload(chunk, _SMALL_BYTES)
        assert damaged <= 4 * 12
        assert tier.used_bytes <= tier.capacity_bytes
        tier.delete(found)
        tier.close()
