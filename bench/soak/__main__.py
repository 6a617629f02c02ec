"""Fault injection for minutes: nothing may be lost, wrong or growing.

    python -m bench.soak router --minutes 30 --json bench/results/soak.json
    python -m bench.soak router --minutes 30 --gateway envoy --json bench/results/soak-envoy.json
    python -m bench.soak engine --minutes 20 --json bench/results/engine-stress.json
    python -m bench.soak router --minutes 1.5

`router` (see `bench.soak.router`) injects faults into simulated replicas behind the router;
`engine` (see `bench.soak.engine`) into cache engines, their disks and their Redis. Exit code 0:
every verdict holds.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.command import origin, positive, work_directory, write_report
from bench.soak.engine import EngineSoak, soak_engine
from bench.soak.harness import LongRun, Result
from bench.soak.router import RouterSoak, soak_router
from bench.ttft import BenchError
from router.launch.processes import ChildFailedError

_PROG = "bench.soak"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROG, description="Inject faults: is anything lost, wrong, growing?"
    )
    targets = parser.add_subparsers(dest="target", required=True)
    router = _target(targets, "router", RouterSoak())
    router.add_argument("--gateway", choices=["envoy"], help="let it carry the requests")
    _target(targets, "engine", EngineSoak())
    return parser.parse_args(argv)


def _target(targets: Any, name: str, default: LongRun) -> argparse.ArgumentParser:
    """Add a target, with an option for each of its numbers."""
    made: argparse.ArgumentParser = targets.add_parser(name, help=type(default).__doc__)
    for field, value in vars(default).items():
        if isinstance(value, bool):
            continue
        kind = positive if isinstance(value, int) else float
        option = f"--{field.replace('_', '-')}"
        made.add_argument(option, type=kind, default=value, help=f"default: {value:g}")
    made.add_argument(
        "--logs", type=Path, metavar="DIR", help="an empty directory for logs and disks, kept"
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, from a clean tree"
    )
    return made


def _run(arguments: argparse.Namespace, directory: Path) -> Result:
    skipped = ("target", "gateway", "logs", "json")
    given = {name: value for name, value in vars(arguments).items() if name not in skipped}

    def say(text: str) -> None:
        print(text, flush=True)

    if arguments.target == "engine":
        return asyncio.run(soak_engine(EngineSoak(**given), directory, say))
    settings = RouterSoak(**given, by_envoy=arguments.gateway == "envoy")
    return uvloop.run(soak_router(settings, directory, say))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak, print what it shows, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child processes, too
    try:
        head = origin(_PROG, given, arguments.json)
        with work_directory(arguments.logs) as directory:
            done = _run(arguments, directory)
    except (BenchError, ChildFailedError, OSError, ValueError) as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(done.table())
    if arguments.json is not None:
        write_report(arguments.json, head | done.as_json())
    return 0 if done.holds else 1


if __name__ == "__main__":
    sys.exit(main())
