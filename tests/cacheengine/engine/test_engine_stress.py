"""Many threads on one engine, a real disk and a remote tier: bytes stay right, nothing hangs."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from cacheengine.residency.decisions import Presence
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import Bench, config, key, payload, wait_until
from tests.cacheengine.scripted_tier import ScriptedRemote
from tests.cacheengine.tiers.disk_chunks import bytes_under

SEED = 20_240_229
TURNS = 10_000
ACTORS = 6
CONVERSATIONS = [[key(100 * talk + turn) for turn in range(6)] for talk in range(12)]
PAYLOADS = {chunk: payload(chunk) for talk in CONVERSATIONS for chunk in talk}


class Worker(threading.Thread):
    """One actor with a random order of its own, derived from the fixed seed.

    `ACTIONS` has what a turn can be.
    """

    def __init__(self, bench: Bench, remote: ScriptedRemote, number: int) -> None:
        super().__init__(name=f"stress-{number}")
        self.bench = bench
        self.engine = bench.engine
        self.remote = remote
        self.random = random.Random(SEED + number)
        self.error: BaseException | None = None
        self.checked = 0

    def run(self) -> None:
        actions = [action for action, weight in ACTIONS.items() for _ in range(weight)]
        try:
            for _ in range(TURNS):
                self.random.choice(actions)(self)
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            self.error = error

    def prefix(self) -> list[bytes]:
        return self.random.choice(CONVERSATIONS)[: self.random.randint(1, 6)]

    def assert_right(self, chunk: bytes, slot: int) -> None:
        """Compare the bytes of a chunk that this actor holds, twice: they must not change."""
        for _ in range(2):
            assert bytes(self.bench.pool.view(slot)) == PAYLOADS[chunk]
        self.checked += 1


def store(worker: Worker) -> None:
    reservation = worker.engine.prepare_store(worker.prefix())
    if reservation is None:
        return
    fails = worker.random.random() < 0.1
    for chunk, slot in zip(reservation.keys, reservation.slots, strict=True):
        view = worker.engine.view(slot)
        view[:] = b"\xee" * len(view)
        if not fails:
            view[:] = PAYLOADS[chunk]
    worker.engine.complete_store(reservation.keys, success=not fails)


def load(worker: Worker) -> None:
    for chunk in worker.prefix():
        slot = worker.engine.try_hold(chunk)
        if slot is None:
            if worker.engine.lookup(chunk) in (Presence.DISK, Presence.REMOTE):
                worker.engine.promote([chunk], pin_s=0.01)
            return
        try:
            worker.assert_right(chunk, slot)
        finally:
            worker.engine.release([chunk])


def prefetch(worker: Worker) -> None:
    promotion = worker.engine.promote(worker.prefix(), pin_s=worker.random.choice([0.0, 0.005]))
    assert promotion.wait(20), "a promotion hangs"


def touch(worker: Worker) -> None:
    worker.engine.touch(worker.prefix())
    worker.engine.expire_pins()


def clear(worker: Worker) -> None:
    if worker.random.random() < 0.1:
        tiers = worker.random.choice([None, ["cpu"], ["disk"], ["remote"]])
        worker.engine.clear(tiers, worker.random.choice([None, worker.prefix()]))


def pin(worker: Worker) -> None:
    tier = worker.random.choice(["cpu", "disk", "remote"])
    act = worker.engine.pin if worker.random.random() < 0.3 else worker.engine.unpin
    prefix = worker.prefix()
    assert act(prefix, tier) <= len(prefix)


def look_around(worker: Worker) -> None:
    worker.engine.snapshot()
    worker.engine.take_events()
    worker.engine.stats()
    worker.engine.check()


def others_put(worker: Worker) -> None:
    """Another engine's store, with the same bytes for the same keys."""
    for chunk in worker.prefix():
        worker.remote.chunks[chunk] = PAYLOADS[chunk]


def the_server_evicts(worker: Worker) -> None:
    for chunk in worker.prefix():
        worker.remote.chunks.pop(chunk, None)


def the_server_stumbles(worker: Worker) -> None:
    """For a moment it does not answer; the engine then leaves it alone for a second or more."""
    if worker.random.random() < 0.0002:
        worker.remote.answers = False
        prefetch(worker)
        worker.remote.answers = True


ACTIONS: Final[dict[Callable[[Worker], None], int]] = {
    store: 4,
    load: 3,
    prefetch: 2,
    touch: 1,
    clear: 1,
    pin: 1,
    look_around: 1,
    others_put: 1,
    the_server_evicts: 1,
    the_server_stumbles: 1,
}
"""What an actor may do in a turn, and how often compared to the others."""


def _run(bench: Bench, remote: ScriptedRemote) -> None:
    workers = [Worker(bench, remote, number) for number in range(ACTORS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)
        assert not worker.is_alive(), "hangs"
    errors = [worker.error for worker in workers if worker.error]
    assert errors == []
    assert sum(worker.checked for worker in workers) > 0


def _assert_sound_in_the_end(bench: Bench, remote: ScriptedRemote, directory: Path) -> None:
    engine = bench.engine
    engine.check()
    stats = engine.stats()
    assert min(stats.disk.puts, stats.disk.gets, stats.remote.puts, stats.remote.gets) > 0
    assert stats.remote.found > 0
    assert stats.lower_tiers.corrupt == stats.lower_tiers.io_errors == 0
    bench.finish_puts()
    limit_bytes = config(directory, disk_items=30).max_local_disk_bytes
    assert 0 < bytes_under(directory) <= limit_bytes
    # No slot is lost: when all is cleared and nothing is under way, all are free.
    engine.clear()
    wait_until(lambda: engine.stats().cpu_used_bytes == 0)
    wait_until(lambda: engine.tier_info()["disk"].used_bytes == 0)
    assert len(bench.store(CONVERSATIONS[0] + CONVERSATIONS[1]) or ()) == 12
    engine.check()


def _bench(
    make_bench: MakeBench, directory: Path, *, local_cpu: bool, paths: int
) -> tuple[Bench, ScriptedRemote]:
    remote = ScriptedRemote()
    remote.batch_chunks = 3
    bench = make_bench(
        20,
        replace(
            config(directory, disk_items=30, local_cpu=local_cpu),
            local_disk=tuple(directory / str(number) for number in range(paths)),
        ),
        clock=time.monotonic,
        remote=remote,
    )
    return bench, remote


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize(("local_cpu", "paths"), [(True, 1), (False, 3)])
def test_bytes_stay_right_under_load(
    make_bench: MakeBench, tmp_path: Path, local_cpu: bool, paths: int
) -> None:
    bench, remote = _bench(make_bench, tmp_path, local_cpu=local_cpu, paths=paths)
    _run(bench, remote)
    _assert_sound_in_the_end(bench, remote, tmp_path)
