"""When a router notices that a replica is down, or up again."""

import asyncio

from replay.our_router import PROBE_S, Health
from replay.replica import ModelReplica
from tests.bench.discrete.building import in_model_time, machine


class Bench:
    """Three replicas that are watched, and what was heard of them."""

    def __init__(self) -> None:
        self.replicas = [ModelReplica(slot, machine()) for slot in range(3)]
        self.heard: list[tuple[float, int, bool]] = []
        self.health = Health(self.replicas, self._changed)
        self._loop = asyncio.get_running_loop()
        self.watching = self._loop.create_task(self.health.watch())

    def _changed(self, replica: ModelReplica, is_up: bool) -> None:
        self.heard.append((self._loop.time(), replica.slot, is_up))


@in_model_time
async def test_a_failed_try_is_noticed_at_once() -> None:
    bench = Bench()
    assert bench.health.healthy == [0, 1, 2]
    bench.replicas[1].die()
    bench.health.suspect(bench.replicas[1])
    assert bench.health.healthy == [0, 2]
    assert bench.heard == [(0.0, 1, False)]


@in_model_time
async def test_without_a_try_the_next_probe_notices_it() -> None:
    bench = Bench()
    await asyncio.sleep(PROBE_S / 2)
    bench.replicas[1].die()
    await asyncio.sleep(PROBE_S / 4)
    assert bench.health.healthy == [0, 1, 2]
    await asyncio.sleep(PROBE_S / 2)
    assert bench.health.healthy == [0, 2]
    bench.replicas[1].come_back()
    await asyncio.sleep(PROBE_S)
    assert bench.health.healthy == [0, 1, 2]
    assert bench.heard == [(PROBE_S, 1, False), (2 * PROBE_S, 1, True)]


@in_model_time
async def test_who_was_suspected_in_vain_stays() -> None:
    bench = Bench()
    bench.health.suspect(bench.replicas[0])
    assert (bench.health.healthy, bench.heard) == ([0, 1, 2], [])
