"""How close the cache engine comes to what the machine itself can do.

    python -m bench.engine --json bench/results/engine.json

Every figure is compared with its limit, measured in the same run, in turns: a
memcpy for the cpu tier, a checksum for a pool that is kept, plain O_DIRECT and
vLLM's own tiering for the disk tier, a plain dict for the index. What needs
vLLM and torch is left out, saying so, where they are not installed. Takes some
minutes and, for the time, some GB of the disk.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.command import write_report
from bench.engine.cases import MIB, Case, as_json, table
from bench.engine.disk import disk
from bench.engine.index import index
from bench.engine.kept import kept
from bench.ttft import BenchError, machine

PARTS: Final = ("cpu", "kept", "disk", "index")
DISK_SIZES: Final = (64 * 1024, 256 * 1024, 4 * MIB, 32 * MIB)
MOST_CHUNKS: Final = 1024


def measure(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield every case as soon as it is measured."""
    sizes = [
        (arguments.chunks, arguments.chunk_bytes),
        (2 * arguments.chunks, arguments.chunk_bytes // 2),
    ]
    if "cpu" in arguments.parts:
        for chunks, chunk_bytes in sizes:
            yield from _copies(chunks, chunk_bytes, arguments.rounds)
    if "kept" in arguments.parts:
        yield from kept(sizes, arguments.rounds)
    if "disk" in arguments.parts:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="warmroute-bench-") as name:
            for chunk_bytes in DISK_SIZES:
                chunks = max(1, min(arguments.disk_bytes // chunk_bytes, MOST_CHUNKS))
                yield from disk(Path(name, str(chunk_bytes)), chunks, chunk_bytes, arguments.rounds)
    if "index" in arguments.parts:
        yield from index(arguments.index_chunks, arguments.rounds)


def _copies(chunks: int, chunk_bytes: int, rounds: int) -> Iterator[Case]:
    try:
        copies = importlib.import_module("bench.engine.copies").copies
    except ImportError as error:
        print(f"the cpu tier is left out: {error}", file=sys.stderr)
        return
    yield from copies(chunks, chunk_bytes, rounds)


def report(arguments: argparse.Namespace, cases: Sequence[Case]) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    names = ("chunks", "chunk_bytes", "disk_bytes", "index_chunks", "rounds")
    options = [f"--{name.replace('_', '-')} {getattr(arguments, name)}" for name in names]
    if tuple(arguments.parts) != PARTS:
        options.append(f"--parts {' '.join(arguments.parts)}")
    return {
        "what": "the cache engine beside the machine's own limits, measured in turns",
        "command": f"python -m bench.engine {' '.join(options)}",
        "machine": machine(),
        "cases": [as_json(case) for case in cases],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine",
        description="The cache engine beside the machine's own limits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--chunks", type=int, default=64, help="moved at once")
    parser.add_argument(
        "--chunk-bytes", type=int, default=2 * MIB, help="twice as many of half the size, too"
    )
    parser.add_argument(
        "--disk-bytes", type=int, default=256 * MIB, help="in chunks of four sizes, at once"
    )
    parser.add_argument("--index-chunks", type=int, default=1_000_000, help="known to the index")
    parser.add_argument("--rounds", type=int, default=11, help="of every case")
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: the temporary")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    arguments = _arguments(argv)
    cases: list[Case] = []
    try:
        for case in measure(arguments):
            cases.append(case)
            print(f"measured: {case.name}", file=sys.stderr)
    except (BenchError, OSError) as error:
        print(f"{table(cases)}\nbench.engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(cases))
    if arguments.json:
        write_report(arguments.json, report(arguments, cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
