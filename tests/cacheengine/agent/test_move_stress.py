"""Two replicas that store, load, promote, evict and move at once: bytes stay right."""

import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheengine.residency.decisions import Presence
from tests.cacheengine.agent.moving_replica import Replica
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, payload, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 20_240_229
TURNS = 1000
CONVERSATIONS = [[key(100 * talk + turn) for turn in range(8)] for talk in range(12)]
TIERS = ("cpu", "disk")


class Worker(threading.Thread):
    """One actor on both replicas with a random order of its own, derived from the fixed seed."""

    def __init__(self, replicas: list[Replica], number: int) -> None:
        super().__init__(name=f"stress-{number}")
        self.replicas = replicas
        self.random = random.Random(SEED + number)
        self.error: BaseException | None = None
        self.checked = 0
        self.moves = {"done": 0, "failed": 0}

    def run(self) -> None:
        try:
            for _ in range(TURNS):
                self.turn()
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            self.error = error

    def turn(self) -> None:
        prefix = self.random.choice(CONVERSATIONS)[: self.random.randint(1, 8)]
        first, second = self.random.sample(self.replicas, 2)
        engine = first.bench.engine
        match self.random.randrange(16):
            case 0 | 1 | 2 | 3:
                self.store(first.bench, prefix)
            case 4 | 5 | 6:
                self.load(first.bench, prefix)
            case 7 | 8:
                engine.promote(prefix, pin_s=self.random.choice([0.0, 0.005])).wait(20)
            case 9:
                engine.touch(prefix)
                engine.expire_pins()
            case 10:
                if self.random.random() < 0.05:
                    engine.clear(self.random.choice([None, ["cpu"], ["disk"]]))
            case 11:
                engine.snapshot()
                engine.take_events()
                engine.check()
            case 12:
                engine.pin(prefix, "cpu")
                engine.unpin(prefix, "cpu")
            case 13 | 14 | 15:
                self.move(first, second, prefix)

    def store(self, bench: Bench, prefix: list[bytes]) -> None:
        reservation = bench.engine.prepare_store(prefix)
        if reservation is None:
            return
        fails = self.random.random() < 0.1
        for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
            view = bench.pool.view(slot)
            view[:] = b"\xee" * len(view)
            if not fails:
                view[:] = payload(chunk)
        bench.engine.complete_store(reservation.keys, success=not fails)

    def load(self, bench: Bench, prefix: list[bytes]) -> None:
        for chunk in prefix:
            slot = bench.engine.try_hold(chunk)
            if slot is None:
                if bench.engine.lookup(chunk) is Presence.DISK:
                    bench.engine.promote([chunk], pin_s=0.01)
                return
            try:
                for _ in range(2):
                    assert bytes(bench.pool.view(slot)) == payload(chunk)
                self.checked += 1
            finally:
                bench.engine.release([chunk])

    def move(self, old: Replica, new: Replica, prefix: list[bytes]) -> None:
        body = {
            "source": {
                "agent_url": old.url,
                "transfer_address": old.address,
                "tier": self.random.choice(TIERS),
            },
            "tier": self.random.choice(TIERS),
            "keys": [chunk.hex() for chunk in prefix],
            "copy": self.random.random() < 0.5,
            "pin_s": self.random.choice([0.0, 0.01]),
        }
        event_id = call(f"{new.url}/move", body)["event_id"]
        ended = call(f"{new.url}/moves/{event_id}?wait_s=30")
        self.moves[ended["state"]] += 1
        assert ended["arrived_chunks"] <= ended["asked_chunks"]


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}),
        timeout=60,
    ) as response:
        return json.loads(response.read())


@pytest.fixture
def replicas(make_bench: MakeBench, tmp_path: Path) -> Iterator[list[Replica]]:
    """One keeps what it moved to disk in its pool, one does not."""
    made = [
        Replica(
            name,
            make_bench(
                20,
                config(tmp_path / name, disk_items=30, local_cpu=local_cpu),
                clock=time.monotonic,
            ),
        )
        for name, local_cpu in (("one", True), ("two", False))
    ]
    yield made
    for replica in made:
        replica.agent.stop()
        replica.server.stop()


@pytest.mark.usefixtures("restless_threads")
def test_bytes_stay_right_while_chunks_move(replicas: list[Replica]) -> None:
    workers = [Worker(replicas, number) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(150)
        assert not worker.is_alive(), "hangs"
    assert [worker.error for worker in workers if worker.error] == []
    assert sum(worker.checked for worker in workers) > 0
    assert sum(worker.moves["done"] for worker in workers) > 0
    for replica in replicas:
        replica.agent.stop()
        replica.server.stop()
        assert replica.server.num_connections == 0
        stats = replica.meter.stats()
        assert stats.sent_chunks > 0
        assert stats.received_chunks > 0
        assert stats.receive_corrupt == stats.receive_failures == stats.send_failures == 0
        assert_nothing_held(replica.bench)
    for talk in CONVERSATIONS:
        for replica in replicas:
            have = [chunk for chunk in talk if replica.bench.engine.try_hold(chunk) is not None]
            assert replica.bench.has_right_bytes(have)
            replica.bench.engine.release(have)


def assert_nothing_held(bench: Bench) -> None:
    """When the last pins have expired, every slot may be evicted, and the books are right."""

    def is_idle() -> bool:
        bench.engine.expire_pins()
        return bench.engine.stats().cpu_held_bytes == 0

    wait_until(is_idle)
    bench.engine.check()
