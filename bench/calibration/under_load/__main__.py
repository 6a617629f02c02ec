"""Calibrate the simulated replica under load: two of them, and two real ones, the same sessions.

    python -m bench.calibration.under_load --seeds 3 --json bench/results/calibration-load.json

Starts two real vLLM replicas with the cache engine inside, their GPU and CPU tiers
too small for all sessions, and takes their times: of one while the other computes, as
under load each does most of the time. Sends sessions through our router at the load
that these times give, and then the same sessions to two simulated replicas with the
rates that follow, behind a router with the same configuration, and to the same
replicas in model time.

The TTFTs must be within 20% at p50 and p90. Wants a machine that does nothing else;
each seed takes about 5 minutes for each of the two fleets.
"""

import argparse
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.calibration.__main__ import Measured, warm_up
from bench.calibration.kinds import Prompts
from bench.calibration.rates import Times, fit
from bench.calibration.replica import (
    Fleet,
    start_real_fleet,
    start_simulated_fleet,
)
from bench.calibration.target import Target
from bench.calibration.under_load.model import play_in_model_time, with_rates
from bench.calibration.under_load.report import REAL, Seed, as_json, is_close, table
from bench.calibration.under_load.stage import Played, moved_rates, play, start_router
from bench.calibration.under_load.workload import Offered, offered
from bench.command import positive, write_report
from bench.replica.local import CannotStart
from bench.replica.tiers import NotThere
from bench.simulator.model.machine import Machine
from bench.simulator.model.rates import Shape
from bench.ttft import BenchError, machine
from router.processes import ChildFailed, ProcessGroup

SIMULATED: Final = "simulated"
MODEL: Final = "model"
"""The same replicas in model time."""
MACHINE: Final = Machine(
    shape=Shape(
        gpu_tokens=24_576,
        block_tokens=128,
        chunk_tokens=256,
        max_batched_tokens=2048,
        max_sequences=8,
    ),
    cpu_tokens=24_576,
    disk_tokens=262_144,
)
"""GPU and CPU tiers that hold six prompts each, and a disk tier for all that live."""
_REPLICAS: Final = 2
_SETTLE_S: Final = 0.5
_BUSY_TOKENS: Final = 2_000
_BUSY_SEED: Final = -1_000


def say(text: str) -> None:
    """Tell how far it is; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def measure(fleet: Fleet, *, rounds: int, seed: int) -> Times:
    """Return the times of the first replica while the others compute."""
    targets = [Target(each, settle_s=_SETTLE_S) for each in fleet.replicas]
    for each in targets:
        warm_up(each)
    measured, prompts = Measured(), Prompts(seed)
    with busy(fleet.replicas[1:]):
        for number in range(rounds):
            say(f"times of the real replica, round {number + 1} of {rounds}")
            measured.take(targets[0], prompts)
    return measured.times()


@contextmanager
def busy(replicas: Sequence[Any]) -> Iterator[None]:
    """Keep replicas computing prompts, one after the other, for the time of the block."""
    done = threading.Event()

    def compute(target: Target, prompts: Prompts) -> None:
        while not done.is_set():
            target.ask(prompts.next(_BUSY_TOKENS))

    threads = [
        threading.Thread(target=compute, args=(Target(each), Prompts(_BUSY_SEED - index)))
        for index, each in enumerate(replicas)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        done.set()
        for each in threads:
            each.join()


def workloads(arguments: argparse.Namespace, rates: Mapping[str, float]) -> dict[int, Offered]:
    """Return the sessions of each seed, at the load that replicas with these rates can take."""
    return {
        seed: offered(
            with_rates(MACHINE, rates),
            replicas=_REPLICAS,
            load=arguments.load,
            warm_up_s=arguments.warm_up_s,
            window_s=arguments.window_s,
            seed=seed,
        )
        for seed in range(arguments.seed, arguments.seed + arguments.seeds)
    }


def play_all(
    fleet: Fleet, router_url: str, work: Mapping[int, Offered], name: str
) -> dict[int, Played]:
    """Send the workload of each seed to a fleet."""
    played = {}
    for seed, each in work.items():
        say(f"{name} fleet, seed {seed}: {len(each.sessions)} sessions in {each.end_s:.0f} s")
        played[seed] = play(fleet, router_url, each, seed=seed)
    return played


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Seed]]:
    """Start, measure, send and end everything; return what was measured, and the seeds."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        with ProcessGroup() as group:
            say("starting two real replicas")
            fleet = start_real_fleet(group, work, MACHINE, names=("real1", "real2"))
            times = measure(fleet, rounds=arguments.rounds, seed=arguments.seed)
            rates = asdict(fit(times, batched_tokens=MACHINE.shape.max_batched_tokens))
            say(f"rates: {rates}")
            work_of = workloads(arguments, rates)
            url = start_router(group, work, "router-real", fleet, rates)
            real = play_all(fleet, url, work_of, REAL)
            moved = moved_rates(fleet, url)
        with ProcessGroup() as group:
            rates |= {key: value for key, value in moved.items() if key not in rates}
            fleet = start_simulated_fleet(group, work, MACHINE, rates, replicas=_REPLICAS)
            url = start_router(group, work, "router-simulated", fleet, rates)
            simulated = play_all(fleet, url, work_of, SIMULATED)
    modelled = {
        seed: play_in_model_time(with_rates(MACHINE, rates), each, replicas=_REPLICAS, seed=seed)
        for seed, each in work_of.items()
    }
    fleets = {REAL: real, SIMULATED: simulated, MODEL: modelled}
    seeds = [
        Seed(
            seed=seed,
            offered=each,
            played={name: played[seed] for name, played in fleets.items()},
        )
        for seed, each in work_of.items()
    ]
    measured = {"times": asdict(times), "rates": rates, "moved_under_load": moved}
    return measured, seeds


def report(
    arguments: argparse.Namespace, measured: Mapping[str, Any], seeds: Sequence[Seed]
) -> dict[str, Any]:
    """Return every figure with the command and the machine, ready for JSON."""
    given = ("load", "seeds", "seed", "rounds", "warm_up_s", "window_s")
    options = [f"--{name.replace('_', '-')} {getattr(arguments, name):g}" for name in given]
    return {
        "what": "two simulated replicas beside two real ones under load: the same sessions",
        "command": f"python -m bench.calibration.under_load {' '.join(options)}",
        "machine": machine(),
        "model": "of bench.replica.model, 27 million parameters",
        "sizes": {
            **asdict(MACHINE.shape),
            "cpu_tokens": MACHINE.cpu_tokens,
            "disk_tokens": MACHINE.disk_tokens,
            "replicas": _REPLICAS,
        },
        "measured": measured,
        **as_json(seeds),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.calibration.under_load",
        description="Compare two simulated replicas with two real ones under load.",
    )
    parser.add_argument("--load", type=float, default=0.8, help="default: %(default)s")
    parser.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="of times taken first")
    parser.add_argument("--warm-up-s", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--window-s", type=float, default=240.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    arguments = parser.parse_args(argv)
    for name in ("load", "window_s"):
        if not 0 < getattr(arguments, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')}: must be more than 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and return the exit code: 0 when the simulated TTFTs are close."""
    arguments = _arguments(argv)
    try:
        measured, seeds = run(arguments)
    except (ChildFailed, CannotStart, BenchError, NotThere, OSError, ValueError) as error:
        say(f"bench.calibration.under_load: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(seeds))
    if arguments.json:
        write_report(arguments.json, report(arguments, measured, seeds))
    return 0 if all(is_close(seeds, each) for each in (SIMULATED, MODEL)) else 1


if __name__ == "__main__":
    sys.exit(main())
