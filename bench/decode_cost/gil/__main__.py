"""For how long what is done with a chunk holds the interpreter's lock (GIL).

    python -m bench.decode_cost.gil --json bench/results/gil-holds.json

A thread spins beside each operation (`spinner`); the longest wait of it is the longest hold.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.command import origin, positive, work_directory, write_report
from bench.decode_cost.figures import quantile
from bench.decode_cost.gil import spinner
from bench.decode_cost.gil.chunk_work import Work, chunk_work
from bench.decode_cost.gil.spinner import Spinner, before_other_work
from bench.ttft import BenchError

_WARM_UP: Final = 2


@dataclass(frozen=True, kw_only=True)
class Hold:
    """What one operation has done with the lock, over all rounds."""

    operation: str
    longest_hold_ms: float
    """The longest hold of a round, median over the rounds."""
    third_quarter_ms: float
    """The same of the round that three quarters of them do not exceed."""
    took_ms: float
    """Median."""


def measure_hold(operation: str, work: Callable[[], object], rounds: int) -> Hold:
    """Do the work again and again beside a spinning thread."""
    for _ in range(_WARM_UP):
        work()
    held_s, took_s = [], []
    with before_other_work(), Spinner() as beside:
        for _ in range(rounds):
            beside.begin()
            began_s = time.monotonic()
            work()
            took_s.append(time.monotonic() - began_s)
            held_s.append(beside.longest_s())
    return Hold(
        operation=operation,
        longest_hold_ms=_ms(median(held_s)),
        third_quarter_ms=_ms(quantile(held_s, 0.75)),
        took_ms=_ms(median(took_s)),
    )


def measure(work: Mapping[str, Work], rounds: int) -> list[Hold]:
    """Return what each operation holds."""
    return [measure_hold(name, each, rounds) for name, each in work.items()]


def table(holds: Sequence[Hold]) -> str:
    """Return the figures as lines."""
    lines = [f"{'ms of the GIL':<44}{'longest':>9}{'75%':>9}{'of':>9}"]
    lines += [
        f"{each.operation:<44}{each.longest_hold_ms:>9.3f}{each.third_quarter_ms:>9.3f}{each.took_ms:>9.2f}"
        for each in holds
    ]
    return "\n".join(lines)


def report(arguments: argparse.Namespace, holds: Sequence[Hold]) -> dict[str, Any]:
    """Return all figures, ready for JSON."""
    return {
        "what": "for how long what is done with one chunk holds the interpreter's lock",
        "chunk_bytes": arguments.chunk_mib << 20,
        "rounds": arguments.rounds,
        "how_to_read": " ".join((spinner.__doc__ or "").split()),
        "holds": [asdict(each) for each in holds],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.decode_cost.gil", description="How long work on chunks holds the GIL."
    )
    default = "default: %(default)s"
    parser.add_argument("--chunk-mib", type=positive, default=32, help=f"size; {default}")
    parser.add_argument("--rounds", type=positive, default=25, help=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the result; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    try:
        head = origin("bench.decode_cost.gil", given, arguments.json)
        with work_directory(None) as directory, ExitStack() as stack:
            work = chunk_work(arguments.chunk_mib << 20, directory, stack)
            holds = measure(work, arguments.rounds)
    except (BenchError, OSError) as error:
        print(f"bench.decode_cost.gil: {error}", file=sys.stderr)
        return 1
    print(table(holds))
    if arguments.json is not None:
        write_report(arguments.json, head | report(arguments, holds))
    return 0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


if __name__ == "__main__":
    sys.exit(main())
