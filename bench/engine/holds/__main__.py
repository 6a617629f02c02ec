"""How long the engine's lock is held at a time, with a million chunks in the pool.

    python -m bench.engine.holds --json holds.json

A real engine with chunks of one byte and a disk without bytes: nothing but decisions. The time of
every hold of the lock is taken, those of the engine's own threads included.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.command import positive, write_report
from bench.engine.holds.rig import PROMPT_CHUNKS, Rig
from bench.ttft import machine

OPERATIONS: Final[dict[str, Callable[[Rig], object]]] = {
    "lookup, one chunk": Rig.lookups,
    f"hold and release of {PROMPT_CHUNKS}": Rig.holds,
    f"promotion of {PROMPT_CHUNKS} with 3/4 pinned": Rig.promotions,
    f"store of {PROMPT_CHUNKS}, evicting": Rig.stores,
    "snapshot": lambda rig: rig.engine.snapshot(),
    "statistics": lambda rig: rig.engine.stats(),
    "expiry of all pins": Rig.expiry,
    "clear of all tiers": Rig.clear,
}


def measure(rig: Rig) -> Iterator[dict[str, object]]:
    """Do each operation, and yield how long the lock was held, each time."""
    for name, operation in OPERATIONS.items():
        gc.collect()
        rig.lock.held_us.clear()
        rig.lock.collecting_us.clear()
        began_s = time.perf_counter()
        operation(rig)
        took_s = time.perf_counter() - began_s
        held_us = sorted(rig.lock.held_us)
        shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}
        times = {each: held_us[int(share * (len(held_us) - 1))] for each, share in shares.items()}
        times["longest, with a full collection"] = max(rig.lock.collecting_us, default=0.0)
        yield {"operation": name, "holds": len(held_us), "took_s": took_s, "held_us": times}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each operation, write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.engine.holds", description="Time the lock.")
    parser.add_argument("--chunks", type=positive, default=1_000_000, help="in the pool")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    arguments = parser.parse_args(argv)
    rig = Rig(arguments.chunks)
    found = []
    for case in measure(rig):
        found.append(case)
        print(case)
    rig.engine.close()
    if arguments.json:
        command = f"python -m bench.engine.holds --chunks {arguments.chunks}"
        what = "microseconds for which the engine's lock was held, by operation"
        report = {"what": what, "command": command, "machine": machine(), "results": found}
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
