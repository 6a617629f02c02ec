"""An engine with a kept pool, killed at random moments some hundred times.

Each child continues with the pool that the one before it left: it stores, promotes, evicts, uses
and clears until it is killed. Then every sealed slot must hold the bytes of its key, all of them,
and what the last clear took away must not be found.
"""

import mmap
import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from cacheengine.bulk import checksum
from cacheengine.kept_pool import PoolSeals, open_pool_file
from tests.cacheengine.helpers import CHUNK_BYTES, config, keys, layout, payload
from tests.cacheengine.kept_engine import KeptEngine

SLOTS = 12
KILLS = 400
NUMBERS = 40
"""Chunks that there are: more than the pool and the disk hold."""
EPOCH_BYTES = 4
PIECES = 4


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(f"/dev/shm/test-{uuid.uuid4()}")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def _chunks(epoch: int, *numbers: int) -> list[bytes]:
    """Return keys that say to which epoch they belong: each clear begins one."""
    return [epoch.to_bytes(EPOCH_BYTES, "big") + each[EPOCH_BYTES:] for each in keys(*numbers)]


def _store_slowly(engine: KeptEngine, chunks: list[bytes]) -> None:
    """Store as a worker's copy does: all chunks piece by piece, each whole at the end."""
    reservation = engine.engine.prepare_store(chunks)
    if reservation is None:
        return
    whole = [payload(chunk) for chunk in reservation.keys]
    for start in range(0, CHUNK_BYTES, CHUNK_BYTES // PIECES):
        part = slice(start, start + CHUNK_BYTES // PIECES)
        for slot, content in zip(reservation.slots, whole, strict=True):
            engine.pool.view(slot)[part] = content[part]
    engine.engine.complete_store(reservation.keys)


def _work_until_killed(directory: Path, disk: Path, epoch: int, seed: int, begun: int) -> NoReturn:
    try:
        chance = random.Random(seed)
        engine = KeptEngine(directory, SLOTS, config(disk, disk_items=20))
        os.write(begun, b"s")
        while True:
            chunks = _chunks(epoch, *chance.sample(range(NUMBERS), chance.randint(1, 5)))
            match chance.randrange(8):
                case 0 | 1 | 2:
                    _store_slowly(engine, chunks)
                case 3 | 4:
                    promotion = engine.engine.promote(chunks, pin_s=0.0)
                    if chance.random() < 0.5:
                        promotion.wait(1.0)
                case 5:
                    engine.engine.touch(chunks)
                case 6:
                    engine.engine.clear(["cpu"], chunks[:1])
                case _ if chance.random() < 0.1:
                    # What it had must never be found again, wherever it is killed from here on.
                    engine.engine.clear()
                    epoch += 1
                    os.write(begun, b"c")
                case _:
                    time.sleep(0.001)
    finally:
        os._exit(1)


def _check(directory: Path, oldest_epoch: int) -> int:
    """Compare all sealed slots with what their keys stand for; return how many there were."""
    index = SLOTS * CHUNK_BYTES
    size = index + PoolSeals.size_bytes(SLOTS)
    file = open_pool_file(directory, size, wait_s=20.0)
    memory = memoryview(mmap.mmap(file, size))
    os.close(file)
    seals = PoolSeals(memory[index:], layout().fingerprint(), SLOTS)
    for slot, chunk, digest in seals.kept:
        content = memory[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]
        assert content == payload(chunk), "a sealed slot with other bytes"
        assert checksum(content) == digest
        assert int.from_bytes(chunk[:EPOCH_BYTES], "big") >= oldest_epoch, "cleared, and there"
    assert len({seal.key for seal in seals.kept}) == len(seals.kept)
    return len(seals.kept)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whenever_it_is_killed_no_seal_lies(directory: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    epoch, found = 0, []
    for number in range(KILLS):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            _work_until_killed(directory, tmp_path / "disk", epoch, number, theirs)
        os.close(theirs)
        assert os.read(ours, 1) == b"s", "it did not start"
        time.sleep(chance.random() ** 2 * 0.1)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it ended by itself"
        with os.fdopen(ours, "rb") as told:
            epoch += told.read().count(b"c")
        found.append(_check(directory, epoch))
    # Kills lose chunks, but not all of them each time.
    assert sum(found) > KILLS
