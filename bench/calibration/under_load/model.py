"""The same sessions in model time: what the proof plays, beside the fleets of the clock."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bench.calibration.under_load.counts import Counts
from bench.calibration.under_load.stage import Played
from bench.calibration.under_load.workload import Offered
from bench.discrete.contenders import play
from bench.discrete.play import FleetOptions
from simulator.model.machine import Machine
from simulator.model.rates import Rates

_ROUTER: Final = "ours-with-true-rates"
"""The routers of the other fleets start from the measured rates, too."""


def with_rates(machine: Machine, rates: Mapping[str, float]) -> Machine:
    """Return a machine of the same sizes with these rates, those that it knows."""
    known = {name: value for name, value in rates.items() if name in Rates.__dataclass_fields__}
    return replace(machine, rates=Rates(**known))


def play_in_model_time(machine: Machine, offered: Offered, *, replicas: int, seed: int) -> Played:
    """Play a workload before replicas of this kind.

    What the server does before a request is queued takes no time there: it is added.
    """
    run = play(
        _ROUTER, offered.sessions, FleetOptions(replicas=replicas, machine=machine, seed=seed)
    )
    records = [replace(each) for each in run.records]
    for each in records:
        if each.ttft_s is not None:
            each.ttft_s += machine.rates.request_s
    hits = {
        f"{tier}_hit_tokens": float(sum(each.cached_tokens.get(tier, 0) for each in records))
        for tier in ("gpu", "cpu", "disk")
    }
    counts = Counts(
        **hits,
        store_drops=run.counts["store_drops"],
        put_drops=run.counts["put_drops"],
        preemptions=run.counts["preemptions"],
    )
    return Played(records=records, counts=counts, gpu_evicted_blocks=None, idle_share=None)
