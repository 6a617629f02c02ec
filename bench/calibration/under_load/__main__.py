"""Calibrate the simulated replica under load: two of them, and two real ones, the same sessions.

    python -m bench.calibration.under_load --seeds 3 --json bench/results/calibration-load.json

Starts two real vLLM replicas with the cache engine inside, their GPU and CPU tiers
too small for all sessions, and takes their times: of one while the other computes, as
under load each does most of the time. Sends sessions through our router at the load
that these times give. Then the same sessions go to two simulated replicas with the
rates that follow, behind a router with the same configuration, and to the same
replicas in model time.

The TTFTs must be within 20% at p50 and p90. Wants a machine that does nothing else;
each seed takes 5 to 20 minutes for each of the two fleets that the clock goes for.
With ``--real FILE`` what the real replicas did is kept there, or taken from there when
it exists: ``--fleet model --rate store_tokens_per_s=50000`` then tells in seconds what
another rate would change. With ``--fit`` how much slower a replica is under load than
alone is taken from the first seed (`fitting`), and the others are compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from bench.calibration.rates import fit
from bench.calibration.replica import start_real_fleet, start_simulated_fleet
from bench.calibration.under_load.fitting import fitted
from bench.calibration.under_load.kept import RealRun, read_real, write_real
from bench.calibration.under_load.measure import measure
from bench.calibration.under_load.model import play_in_model_time, with_rates
from bench.calibration.under_load.report import (
    REAL,
    Seed,
    as_json,
    is_close,
    quantiles_s,
    table,
    ttfts_s,
)
from bench.calibration.under_load.stage import Played, moved_rates, play, start_router
from bench.calibration.under_load.workload import Offered, offered
from bench.command import positive, write_report
from bench.replica.local import CannotStartError
from bench.replica.tiers import NotThereError
from bench.ttft import BenchError, machine
from router.launch.processes import ChildFailedError, ProcessGroup
from simulator.model.machine import Machine
from simulator.model.rates import Rates, Shape

SIMULATED: Final = "simulated"
MODEL: Final = "model"
"""The same replicas in model time."""
MACHINE: Final = Machine(
    shape=Shape(
        gpu_tokens=32_768,
        block_tokens=128,
        chunk_tokens=256,
        max_batched_tokens=2048,
        max_sequences=8,
    ),
    cpu_tokens=49_152,
    disk_tokens=393_216,
)
"""GPU and CPU tiers that hold some prompts each, and a disk tier for all that live.

With a CPU tier of half the size a simulated fleet does not keep up: what is to be read
from disk finds no room beside what is being stored.
"""
_REPLICAS: Final = 2


def say(text: str) -> None:
    """Tell how far it is; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def workload(run: RealRun, seed: int) -> Offered:
    """Return the sessions of a seed, at the load that replicas with the measured rates take."""
    return offered(
        with_rates(MACHINE, run.rates),
        replicas=_REPLICAS,
        load=run.load,
        requests=run.requests,
        seed=seed,
    )


def run_real(arguments: argparse.Namespace, work: Path) -> RealRun:
    """Start, measure, send and end the real replicas."""
    with ProcessGroup() as group:
        say("starting two real replicas")
        fleet = start_real_fleet(group, work, MACHINE, names=("real1", "real2"))
        times = measure(fleet, rounds=arguments.rounds, seed=arguments.seed, say=say)
        rates = asdict(fit(times, batched_tokens=MACHINE.shape.max_batched_tokens))
        say(f"rates: {rates}")
        run = RealRun(
            machine=machine(),
            load=arguments.load,
            requests=arguments.requests,
            rounds=arguments.rounds,
            times=asdict(times),
            rates=rates,
            played={},
        )
        url = start_router(group, work, "router-real", fleet, rates)
        played = {}
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            sessions = workload(run, seed)
            say(f"real fleet, seed {seed}: {_length(sessions)}")
            played[seed] = play(fleet, url, sessions, seed=seed)
        moved = moved_rates(fleet, url)
        # What was measured of a replica alone is the truer.
        return replace(run, played=played, rates={**moved, **rates})


def run_simulated(run: RealRun, rates: Mapping[str, float], work: Path) -> dict[int, Played]:
    """Send the same sessions to simulated replicas by the clock."""
    with ProcessGroup() as group:
        fleet = start_simulated_fleet(group, work, MACHINE, dict(rates), replicas=_REPLICAS)
        url = start_router(group, work, "router-simulated", fleet, rates)
        played = {}
        for seed in run.played:
            sessions = workload(run, seed)
            say(f"simulated fleet, seed {seed}: {_length(sessions)}")
            played[seed] = play(fleet, url, sessions, seed=seed)
        return played


def run_model(run: RealRun, rates: Mapping[str, float], work: Path) -> dict[int, Played]:
    """Send the same sessions to the same replicas in model time."""
    replica = with_rates(MACHINE, rates)
    return {
        seed: play_in_model_time(replica, workload(run, seed), replicas=_REPLICAS, seed=seed)
        for seed in run.played
    }


_FLEETS: Final = {SIMULATED: run_simulated, MODEL: run_model}


def compare(
    run: RealRun, fleets: Sequence[str], rates: Mapping[str, float], work: Path
) -> list[Seed]:
    """Send the sessions of a real run to other fleets; return all beside each other."""
    played = {REAL: run.played} | {name: _FLEETS[name](run, rates, work) for name in fleets}
    return [
        Seed(
            seed=seed,
            offered=workload(run, seed),
            played={name: each[seed] for name, each in played.items()},
        )
        for seed in run.played
    ]


def fit_on_first(run: RealRun, rates: Mapping[str, float]) -> tuple[dict[str, float], RealRun]:
    """Return the rates fitted on the first seed of a run, and the rest of the run.

    Raises `bench.ttft.BenchError` where there is no other seed to compare.
    """
    first, *others = run.played
    if not others:
        raise BenchError("--fit takes one seed to fit on: --seeds must be 2 or more")
    work = workload(run, first)

    def quantiles(played: Played) -> dict[str, float]:
        times_s = ttfts_s(Seed(seed=first, offered=work, played={MODEL: played}), MODEL)
        return quantiles_s(times_s)

    def play_with(tried: Mapping[str, float]) -> dict[str, float]:
        replica = with_rates(MACHINE, tried)
        return quantiles(play_in_model_time(replica, work, replicas=_REPLICAS, seed=first))

    found = fitted(rates, quantiles(run.played[first]), play_with)
    say(f"fitted on seed {first}: {found}")
    return found, replace(run, played={each: run.played[each] for each in others})


def report(run: RealRun, rates: Mapping[str, float], seeds: Sequence[Seed]) -> dict[str, Any]:
    """Return every figure with the command and the machine, ready for JSON."""
    fitted_on = sorted({*run.played} - {each.seed for each in seeds})
    return {
        "what": "two simulated replicas beside two real ones under load: the same sessions",
        "command": f"python -m bench.calibration.under_load --load {run.load:g} "
        f"--requests {run.requests} --rounds {run.rounds} --seed {min(run.played)} "
        f"--seeds {len(run.played)}{' --fit' if fitted_on else ''}",
        "machine": run.machine,
        "compared_on": machine(),
        "model": "of bench.replica.model, 27 million parameters",
        "sizes": {
            **asdict(MACHINE.shape),
            "cpu_tokens": MACHINE.cpu_tokens,
            "disk_tokens": MACHINE.disk_tokens,
            "replicas": _REPLICAS,
        },
        "times": run.times,
        "measured_rates": run.rates,
        "fitted_on": fitted_on,
        "other_rates": {name: value for name, value in rates.items() if run.rates[name] != value},
        **as_json(seeds),
    }


def _length(sessions: Offered) -> str:
    return f"{len(sessions.sessions)} sessions in {sessions.end_s:.0f} s"


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in {each.name for each in fields(Rates)}:
        raise argparse.ArgumentTypeError(f"there is no rate {name}")
    return name, float(value)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.calibration.under_load",
        description="Compare two simulated replicas with two real ones under load.",
    )
    parser.add_argument("--load", type=float, default=0.8, help="default: %(default)s")
    parser.add_argument(
        "--requests", type=positive, default=800, help="compared of each seed (%(default)s)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="of times taken first")
    parser.add_argument(
        "--real", type=Path, metavar="FILE", help="keep what the real replicas did, or take it"
    )
    parser.add_argument(
        "--fleet", action="append", choices=_FLEETS, help="to compare with (default: both)"
    )
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        type=_rate,
        metavar="NAME=X",
        help="of the simulated replicas, instead of what was measured",
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the rates on the first seed, compare the others"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    arguments = parser.parse_args(argv)
    arguments.fleet = arguments.fleet or list(_FLEETS)
    return arguments


def run(arguments: argparse.Namespace) -> tuple[RealRun, dict[str, float], list[Seed]]:
    """Do all of it; return the real run, the simulated replicas' rates and the comparison."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if arguments.real is not None and arguments.real.exists():
            real = read_real(arguments.real)
        else:
            real = run_real(arguments, work)
            if arguments.real is not None:
                write_real(arguments.real, real)
        rates = {**real.rates, **dict(arguments.rate)}
        compared = real
        if arguments.fit:
            rates, compared = fit_on_first(real, rates)
        return real, rates, compare(compared, arguments.fleet, rates, work)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and return the exit code: 0 when the simulated TTFTs are close."""
    arguments = _arguments(argv)
    try:
        real, rates, seeds = run(arguments)
    except (
        ChildFailedError,
        CannotStartError,
        BenchError,
        NotThereError,
        OSError,
        ValueError,
    ) as error:
        say(f"bench.calibration.under_load: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(seeds))
    if arguments.json:
        write_report(arguments.json, report(real, rates, seeds))
    return 0 if all(is_close(seeds, each) for each in arguments.fleet) else 1


if __name__ == "__main__":
    sys.exit(main())
