"""Four cache engines in trouble for 20 minutes: nothing wrong, nothing lost, nothing grows.

    python -m bench.stress --json bench/results/engine-stress.json
    python -m bench.stress --minutes 2

Four real engines with agent and transfer, each a process of its own, on disks of their own and one
real Redis. In each a scheduler makes the calls of vLLM's connector and compares every byte that it
loads. Meanwhile routers' and operators' calls (prefetch, copy, move, pin, clear) come at random,
and every few seconds something is killed, stopped, filled or has bits flipped. Exit code 0: all
holds that must.

The holds of the engines' locks are told by the clock and by what the holder has computed in them.
Where cores are fewer than processes that want one, the clock has in it the time for which the
holder did not run; what it computed has not. A hold whose CPU time is as long as its time by the
clock is the engine's own doing; one that has little of it has waited: for a core, for the
interpreter's lock (GIL), which a thread gives back after 5 ms, or for something else, which no
hold should. Run it on an idle machine, with a core for each engine.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import origin, positive, work_directory, write_report
from bench.stress.report import report, table
from bench.stress.run import Stressed, stress
from bench.stress.settings import Settings
from bench.ttft import BenchError


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench.stress", description="Engines in trouble: is anything wrong, lost, growing?"
    )
    for name in ("minutes", "trouble_every_s", "requests_per_s", "controls_per_s"):
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=value, help=f"default: {value:g}")
    for name in ("engines", "seed", "slots", "disk_chunks", "conversations"):
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=positive, default=value, help=f"default: {value}")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="an empty directory for logs and disks, kept"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, from a clean tree"
    )
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace, directory: Path) -> tuple[Settings, Stressed]:
    given = {name: value for name, value in vars(arguments).items() if name not in ("logs", "json")}
    settings = Settings(**given)

    def say(text: str) -> None:
        print(text, flush=True)

    return settings, asyncio.run(stress(settings, directory, say))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stress, print what it shows, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # all processes are to end then, too
    try:
        head = origin("bench.stress", given, arguments.json)
        with work_directory(arguments.logs) as directory:
            settings, done = _run(arguments, directory)
    except (BenchError, OSError, ValueError) as error:
        print(f"bench.stress: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(done))
    if arguments.json is not None:
        write_report(arguments.json, head | report(settings, done))
    return 0 if done.holds else 1


if __name__ == "__main__":
    sys.exit(main())
