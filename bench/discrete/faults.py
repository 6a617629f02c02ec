"""What goes wrong in a fleet: a replica that is slow, one that dies and returns."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.discrete.replica import ModelReplica
from simulator.model.machine_and_request import Machine


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One replica's."""

    slot: int
    slowdown: float = 1.0
    """It computes for so many times as long, from the start on."""
    dies_s: float | None = None
    returns_s: float | None = None


def machine_of(machine: Machine, slot: int, faults: Sequence[Fault]) -> Machine:
    """Return what a replica runs on, its slowness included."""
    for each in faults:
        if each.slot == slot and each.slowdown != 1.0:
            machine = replace(machine, rates=machine.rates.slowed(each.slowdown))
    return machine


async def run_faults(replicas: Sequence[ModelReplica], faults: Sequence[Fault]) -> None:
    """Let replicas die and return at their times."""
    loop = asyncio.get_running_loop()
    for each in faults:
        replica = replicas[each.slot]
        if each.dies_s is not None:
            loop.call_at(each.dies_s, replica.die)
        if each.returns_s is not None:
            loop.call_at(each.returns_s, replica.come_back)
