"""Many threads on one engine and a real disk: bytes stay right, nothing hangs."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheengine.engine import Presence
from tests.cacheengine.building import Bench, config, key, payload
from tests.cacheengine.conftest import MakeBench

SEED = 20_240_229
TURNS = 4000
CONVERSATIONS = [[key(100 * talk + turn) for turn in range(6)] for talk in range(12)]


class Worker(threading.Thread):
    """One actor with a random order of its own, derived from the fixed seed."""

    def __init__(self, bench: Bench, number: int) -> None:
        super().__init__(name=f"stress-{number}")
        self.bench = bench
        self.random = random.Random(SEED + number)
        self.error: BaseException | None = None
        self.checked = 0

    def run(self) -> None:
        try:
            for _ in range(TURNS):
                self.turn()
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            self.error = error

    def turn(self) -> None:
        prefix = self.random.choice(CONVERSATIONS)[: self.random.randint(1, 6)]
        engine = self.bench.engine
        match self.random.randrange(12):
            case 0 | 1 | 2 | 3:
                self.store(prefix)
            case 4 | 5 | 6:
                self.load(prefix)
            case 7 | 8:
                engine.promote(prefix, pin_s=self.random.choice([0.0, 0.005])).wait(20)
            case 9:
                engine.touch(prefix)
                engine.expire_pins()
            case 10:
                if self.random.random() < 0.1:
                    engine.clear(self.random.choice([None, ["cpu"], ["disk"]]))
            case 11:
                engine.snapshot()
                engine.take_events()
                engine.check()

    def store(self, prefix: list[bytes]) -> None:
        engine = self.bench.engine
        reservation = engine.prepare_store(prefix)
        if reservation is None:
            return
        fails = self.random.random() < 0.1
        for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
            view = self.bench.pool.view(slot)
            view[:] = b"\xee" * len(view)
            if not fails:
                view[:] = payload(chunk)
        engine.complete_store(reservation.keys, success=not fails)

    def load(self, prefix: list[bytes]) -> None:
        engine = self.bench.engine
        for chunk in prefix:
            slot = engine.try_hold(chunk)
            if slot is None:
                if engine.lookup(chunk) is Presence.DISK:
                    engine.promote([chunk], pin_s=0.01)
                return
            try:
                for _ in range(2):
                    assert bytes(self.bench.pool.view(slot)) == payload(chunk)
                self.checked += 1
            finally:
                engine.release([chunk])


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let threads interrupt each other a thousand times as often as usual."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("local_cpu", [True, False])
def test_bytes_stay_right_under_load(
    make_bench: MakeBench, tmp_path: Path, local_cpu: bool
) -> None:
    bench = make_bench(
        20, config(tmp_path, disk_items=30, local_cpu=local_cpu), clock=time.monotonic
    )
    workers = [Worker(bench, number) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive(), "hangs"
    errors = [worker.error for worker in workers if worker.error]
    assert errors == []
    bench.engine.check()
    stats = bench.engine.stats()
    assert sum(worker.checked for worker in workers) > 0
    assert stats.puts > 0
    assert stats.gets > 0
    assert stats.corrupt == stats.io_errors == 0
    bench.finish_puts()
    files = list(tmp_path.rglob("*.kv"))
    assert (
        sum(file.stat().st_size for file in files)
        <= config(tmp_path, disk_items=30).max_local_disk_bytes
    )
