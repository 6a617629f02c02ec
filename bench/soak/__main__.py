"""Faults, odd clients and reloads for half an hour: nothing lost, nothing wrong, nothing grows.

    python -m bench.soak --minutes 30 --json bench/results/soak.json
    python -m bench.soak --minutes 30 --gateway envoy --json bench/results/soak-envoy.json
    python -m bench.soak --minutes 1.5

Simulated replicas, each a process of its own, behind a real `warmroute serve`, or behind a real
Envoy that asks a `warmroute picker`. Every 20 seconds one replica is killed, hung, slowed or
restarted, and every minute the configuration is rewritten and read anew. Clients hold
conversations, a third of their answers not streamed; some leave, read slowly or not at all, send
their bodies slowly or never to the end. Each byte of each answer is compared. Exit code 0: all
holds that must.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.command import origin, positive, work_directory, write_report
from bench.soak.report import report, table
from bench.soak.run import Soaked, soak
from bench.soak.settings import Settings
from bench.ttft import BenchError
from router.launch import ChildFailedError


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench.soak", description="Faults and odd clients: is anything lost, wrong, growing?"
    )
    parser.add_argument("--minutes", type=float, default=default.minutes, help="default: 30")
    for name in ("replicas", "clients", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"default: {value}")
    for name, value in (
        ("fault-every-s", default.fault_every_s),
        ("reload-every-s", default.reload_every_s),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"default: {value:g}")
    parser.add_argument("--gateway", choices=["envoy"], help="let it carry the requests")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the processes' logs there (default: nowhere)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, from a clean tree"
    )
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace, directory: Path) -> tuple[Settings, Soaked]:
    settings = Settings(
        minutes=arguments.minutes,
        replicas=arguments.replicas,
        clients=arguments.clients,
        seed=arguments.seed,
        by_envoy=arguments.gateway == "envoy",
        fault_every_s=arguments.fault_every_s,
        reload_every_s=arguments.reload_every_s,
    )

    def say(text: str) -> None:
        print(text, flush=True)

    return settings, uvloop.run(soak(settings, directory, say))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak, print what it shows, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    try:
        head = origin("bench.soak", given, arguments.json)
        with work_directory(arguments.logs) as directory:
            settings, done = _run(arguments, directory)
    except (BenchError, ChildFailedError, ValueError) as error:
        print(f"bench.soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(done))
    if arguments.json is not None:
        write_report(arguments.json, head | report(settings, done))
    return 0 if done.holds else 1


if __name__ == "__main__":
    sys.exit(main())
