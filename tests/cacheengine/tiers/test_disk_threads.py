"""Threads that put, read and evict at once, as an engine's: no chunk is lost, mixed or damaged."""

import mmap
import random
import threading
from itertools import count
from pathlib import Path

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import CHUNK_BYTES, key, payload
from tests.cacheengine.tiers.disk_chunks import (
    ITEM_BYTES,
    bytes_under,
    get_all,
    open_disk,
    put_all,
)

CAPACITY = 300


class Traffic:
    """What an engine guarantees: one operation on a key at a time, except several gets."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._numbers = count()
        self._writing = 0
        self._idle: list[bytes] = []
        self._held: dict[bytes, int] = {}
        """Chunks, with the number of reads under way."""
        self.outcomes: list[PutOutcome | GetOutcome] = []

    def put_some(self, generator: random.Random) -> None:
        """Evict as many chunks as are put then."""
        wanted = generator.randrange(1, 33)
        with self._lock:
            chunks = [key(next(self._numbers)) for _ in range(wanted)]
            victims: list[bytes] = []
            idle = [chunk for chunk, reads in self._held.items() if not reads]
            while len(self._held) + self._writing + wanted > CAPACITY and idle:
                victims.append(idle.pop(generator.randrange(len(idle))))
                del self._held[victims[-1]]
            if len(self._held) + self._writing + wanted > CAPACITY:
                chunks = []
            self._writing += len(chunks)
        self._tier.delete(victims)
        outcomes = put_all(self._tier, chunks)
        with self._lock:
            self._writing -= len(chunks)
            self._held.update(dict.fromkeys(chunks, 0))
            self.outcomes += outcomes

    def read_some(self, generator: random.Random) -> None:
        """Read chunks that nobody removes meanwhile."""
        with self._lock:
            many = [*self._held]
            first = generator.randrange(len(many) + 1)
            chunks = many[first : first + generator.randrange(1, 33)]
            for chunk in chunks:
                self._held[chunk] += 1
        outcomes = get_all(self._tier, chunks)
        with self._lock:
            for chunk in chunks:
                self._held[chunk] -= 1
            self.outcomes += outcomes

    def held(self) -> list[bytes]:
        return [*self._held]


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("paths", [1, 3])
def test_bytes_stay_right_while_slots_change_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: int
) -> None:
    monkeypatch.setattr("cacheengine.tiers.disk_path._PORTION_BYTES", 20 * ITEM_BYTES)
    monkeypatch.setattr("cacheengine.tiers.disk_path._FILES", 3)
    roots = [tmp_path / str(number) for number in range(paths)]
    tier = open_disk(*roots, chunks=CAPACITY)
    tier.scan()
    traffic = Traffic(tier)
    # Or the readers may end before the first chunk is there.
    traffic.put_some(random.Random(99))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        generator = random.Random(number)
        step = traffic.put_some if number % 2 else traffic.read_some
        try:
            for _ in range(60):
                step(generator)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "hangs"
    assert errors == []
    assert {*traffic.outcomes} == {PutOutcome.STORED, GetOutcome.OK}
    held = traffic.held()
    assert get_all(tier, held) == [GetOutcome.OK] * len(held)
    assert bytes_under(tmp_path) == tier.used_bytes <= tier.capacity_bytes
    for path in range(tier.paths):
        tier.save(held, path, is_final=True)
    tier.close()
    again = open_disk(*roots, chunks=CAPACITY)
    assert again.scan() == held
    assert get_all(again, held) == [GetOutcome.OK] * len(held)
    again.close()


def test_a_read_that_began_before_a_file_was_removed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays the file's until then: it never names another one."""
    import os

    tier = open_disk(tmp_path)
    tier.scan()
    put_all(tier, [key(1)])
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            return real(fd, buffers, offset)
        for file in tier.directories[0].glob("*.kv"):
            file.unlink()
        other = threading.Thread(target=put_all, args=(tier, [key(number) for number in range(9)]))
        other.start()
        other.join()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    assert tier.get(key(1), memory) is GetOutcome.OK
    assert memory == payload(key(1))
    tier.close()
