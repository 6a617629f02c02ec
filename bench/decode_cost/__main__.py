"""What the engine costs running decodes of a real vLLM: time between tokens, GIL, lock.

    python -m bench.decode_cost --json bench/results/decode-cost.json
    python -m bench.decode_cost --rounds 2 --seconds 4

Two vLLMs, one without and one with the engine, take turns; beside the decodes of the second its
engine is idle, promotes from disk or from Redis, sends copies to a peer or receives them, as fast
as it can and at a moderate rate; and in turns with each of these an engine outside of vLLM's
process does the same. As root it takes, for the windows with the cores apart, priority over all
other work of the machine. Each round has every situation once (`situations`), in an order of its
own.

How to read it is in the result (`how_to_read`). In short: where there is no GPU, the model and the
engine's threads compete for cores, wherever the engine is. What being in vLLM's process costs is
the ratio of inside to outside; what of it is no wait for a core, in ``with_core``.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.command import origin, positive, work_directory, write_report
from bench.decode_cost.report import report, table
from bench.decode_cost.run import Settings, measure
from bench.replica.local import CannotStartError
from bench.replica.model import SHAPES
from bench.ttft import BenchError
from router.launch import ChildFailedError


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench.decode_cost", description="What the engine costs running decodes of vLLM."
    )
    for name in ("rounds", "streams", "chunks", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"default: {value}")
    for name in ("seconds", "settling_s"):
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=value, help=f"default: {value:g}")
    parser.add_argument(
        "--kv-bytes-per-token",
        type=int,
        choices=list(SHAPES),
        default=default.kv_bytes_per_token,
        help="of the model that is made for it",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="an empty directory, kept")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, from a clean tree"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    settings = Settings(**{each.name: getattr(arguments, each.name) for each in fields(Settings)})
    try:
        head = origin("bench.decode_cost", given, arguments.json)
        with work_directory(arguments.work) as work:
            told = report(settings, measure(settings, work, lambda text: print(text, flush=True)))
    except (BenchError, CannotStartError, ChildFailedError, OSError) as error:
        print(f"bench.decode_cost: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(told))
    if arguments.json is not None:
        write_report(arguments.json, head | told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
