"""What goes wrong in a fleet goes wrong when it is said to."""

import asyncio

import pytest

from replay.replica import Fault, ModelReplica, machine_of, run_faults
from tests.bench.discrete.building import in_model_time, machine, prompt, served


@in_model_time
async def test_a_slow_replica_computes_for_longer_and_copies_as_fast() -> None:
    faults = [Fault(slot=1, slowdown=3.0)]
    normal, slow = (ModelReplica(slot, machine_of(machine(), slot, faults)) for slot in range(2))
    assert await served(normal, prompt(90)) == pytest.approx(0.1)
    assert await served(slow, prompt(90)) == pytest.approx(0.3)
    assert slow.machine.rates.disk_tokens_per_s == normal.machine.rates.disk_tokens_per_s


def test_a_replica_without_a_fault_has_the_fleets_machine() -> None:
    fleets = machine()
    assert machine_of(fleets, 0, [Fault(slot=1, slowdown=2.0), Fault(slot=0, dies_s=1.0)]) is fleets


@in_model_time
async def test_replicas_die_and_return_at_their_times() -> None:
    replicas = [ModelReplica(slot, machine()) for slot in range(3)]
    await run_faults(
        replicas, [Fault(slot=0, dies_s=1.0, returns_s=3.0), Fault(slot=2, dies_s=2.0)]
    )
    alive = []
    for _ in range(4):
        await asyncio.sleep(0.9)
        alive.append([each.is_alive for each in replicas])
    assert alive == [
        [True, True, True],
        [False, True, True],
        [False, True, False],
        [True, True, False],
    ]
