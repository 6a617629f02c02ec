"""Crowds that ask for nothing, and the ordinary requests beside them.

    python -m bench.crowds --json bench/results/crowds.json
    python -m bench.crowds --quick

5,000 idle connections, 2,000 bodies that come a byte at a time, 200 clients that read nothing of
an answer without end: each crowd before a `warmroute serve` of its own. Ordinary requests are
timed with and without it, in turns; the ratio of their p99 is that over the rounds, with its 95%
interval. Exit code 0: all holds that must.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from bench.command import origin, positive, write_report
from bench.crowds.kinds import KINDS
from bench.crowds.load import BadAnswerError
from bench.crowds.report import as_json, holds, line
from bench.crowds.rounds import Crowded, Pace, crowd
from bench.ttft import BenchError
from router.launch import ChildFailedError

_QUICK: Final = Pace(rounds=2, phase_s=3.0)
_QUICK_SHARE: Final = 20
_SPARE_FILES: Final = 1000


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    pace = Pace()
    names = [each.name for each in KINDS]
    parser = argparse.ArgumentParser(
        prog="bench.crowds", description="Crowds that ask for nothing, and what they cost others."
    )
    parser.add_argument("--crowd", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=positive, default=pace.rounds, help="default: 10")
    parser.add_argument(
        "--phase-s", type=float, default=pace.phase_s, help="of each round, twice (default: 15)"
    )
    parser.add_argument(
        "--per-s", type=float, default=pace.per_s, help="ordinary requests (default: 100)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and short, to see that it works"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, from a clean tree"
    )
    return parser.parse_args(argv)


def raise_file_limit(wanted: int) -> None:
    """Allow this process and those it starts so many open files; raise `BenchError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(f"{wanted} open files are needed, and {hard} are allowed (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _say(text: str) -> None:
    print(text, flush=True)


def _measured(arguments: argparse.Namespace) -> list[Crowded]:
    share = _QUICK_SHARE if arguments.quick else 1
    pace = Pace(rounds=arguments.rounds, phase_s=arguments.phase_s, per_s=arguments.per_s)
    kinds = [each for each in KINDS if each.name in arguments.crowd]
    raise_file_limit(max(each.connections for each in kinds) + _SPARE_FILES)
    found = []
    with tempfile.TemporaryDirectory(prefix="warmroute-crowds-") as made:
        for kind in kinds:
            count = kind.connections // share
            directory = Path(made) / kind.name
            measuring = crowd(kind, count, _QUICK if arguments.quick else pace, directory, _say)
            found.append(uvloop.run(measuring))
            _say(line(found[-1]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    try:
        head = {
            "what": "others' p99 and the router's memory beside crowds that ask for nothing",
            **origin("bench.crowds", given, arguments.json),
            "load_average": os.getloadavg()[0],
            "rounds": arguments.rounds,
            "phase_s": arguments.phase_s,
            "requests_per_s": arguments.per_s,
        }
        found = _measured(arguments)
    except (BenchError, BadAnswerError, ChildFailedError) as error:
        print(f"bench.crowds: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json is not None:
        write_report(arguments.json, head | {"crowds": [as_json(each) for each in found]})
    return 0 if all(holds(each) for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
