"""AIPerf profiles the router, in front of a simulated fleet and of two real replicas.

    python -m bench.aiperf
    python -m bench.aiperf --fleet simulated --out bench/results/aiperf

The same generated conversations, streamed, at a fixed concurrency, three times
in one run, each time on empty caches: through the router; without it, each
conversation to one replica, the replicas in turn, as AIPerf itself spreads
them; and to one replica alone, with its share of the conversations, of the
concurrency and of the contexts that they begin with. The last is what a fleet
could do where the router cost nothing and balanced perfectly (on one machine:
with less going on beside it).

AIPerf is installed on demand into an environment of its own (1.2 GB, minutes);
nothing else is fetched. With ``--out`` its reports are kept, which takes a
clean tree.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from bench.aiperf.client import Workload, aiperf
from bench.aiperf.fleets import FLEETS, Fleet
from bench.aiperf.report import check_nameless, table
from bench.aiperf.runs import ROUTER, Run, measure, say
from bench.command import positive
from bench.environments import NotInstalledError
from bench.proof.kept.tree import Tree
from bench.replica.local import CannotStartError
from bench.replica.tiers import NotThereError
from bench.ttft import BenchError, machine
from router.launch.processes import ChildFailedError

ROOT: Final = Path(__file__).resolve().parents[2]


def keep(
    directory: Path,
    fleet: Fleet,
    workload: Workload,
    runs: Mapping[str, Run],
    made: Mapping[str, object],
) -> None:
    """Write AIPerf's reports, and beside them what they must be read with.

    ``made`` says by which command, and on which machine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        for ending, text in run.kept.items():
            (directory / f"{name}.{ending}").write_text(text, encoding="utf-8")
    told = {
        "what": f"AIPerf in front of {fleet.what}: through the router, and without it",
        **made,
        "aiperf": runs[ROUTER].version,
        "fleet": fleet.settings,
        "workload": asdict(workload),
        "runs": {
            name: {
                "command": shlex.join(["aiperf", *run.told]),
                "wall_s": run.wall_s,
                **asdict(run.figures),
            }
            for name, run in runs.items()
        },
    }
    text = json.dumps(told, indent=2)
    check_nameless(text)
    (directory / "run.json").write_text(f"{text}\n", encoding="utf-8")
    say(f"written to {directory}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.aiperf",
        description="AIPerf profiles the router, in front of a simulated and of a real fleet.",
    )
    parser.add_argument(
        "--fleet", nargs="+", choices=FLEETS, default=list(FLEETS), help="default: both"
    )
    parser.add_argument(
        "--conversations", type=positive, metavar="N", help="default: about a minute of them"
    )
    parser.add_argument("--concurrency", type=positive, metavar="N", help="default: the fleet's")
    parser.add_argument("--ttft-bound-ms", type=positive, metavar="N", help="what counts as good")
    parser.add_argument("--seed", type=int, default=1, help="of the conversations (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the reports there, a folder for each fleet"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="leave what all processes said")
    arguments = parser.parse_args(argv)
    if arguments.out and arguments.out.is_absolute():
        parser.error("--out: give it relative to here; it is written into what is kept")
    return arguments


def _workload(fleet: Fleet, arguments: argparse.Namespace) -> Workload:
    given = {
        name: value
        for name in ("conversations", "concurrency", "ttft_bound_ms", "seed")
        if (value := getattr(arguments, name)) is not None
    }
    return replace(fleet.workload, **given)


def measure_all(arguments: argparse.Namespace, command: str) -> None:
    """Do what the command line says; raise what stood in the way."""
    commit = _clean_commit() if arguments.out else None
    program = aiperf()
    for name in arguments.fleet:
        fleet = FLEETS[name]
        workload = _workload(fleet, arguments)
        say(f"== {fleet.what}: {workload.conversations} conversations")
        here = {**machine(), "commit": commit, "load_average": os.getloadavg()}
        runs = measure(fleet, workload, program, arguments.logs and arguments.logs / name)
        print(f"{runs[ROUTER].table}\n")
        title = f"{fleet.what}, TTFT bound {workload.ttft_bound_ms} ms"
        print(table(title, {each: run.figures for each, run in runs.items()}) + "\n")
        if arguments.out:
            keep(arguments.out / name, fleet, workload, runs, {"command": command, "machine": here})


def _clean_commit() -> str:
    """Return what results are kept of; raises `BenchError` for a tree with changes."""
    tree = Tree(ROOT)
    tree.require_clean()
    return tree.commit()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, keep the reports; return the exit code."""
    arguments = _arguments(argv)
    given = sys.argv[1:] if argv is None else argv
    try:
        measure_all(arguments, shlex.join(["python", "-m", "bench.aiperf", *given]))
    except (
        BenchError,
        CannotStartError,
        ChildFailedError,
        NotInstalledError,
        NotThereError,
        OSError,
    ) as error:
        say(f"bench.aiperf: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
