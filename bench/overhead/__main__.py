"""What a router itself costs, contenders in rotation in one run.

    python -m bench.overhead --json bench/results/overhead.json
    python -m bench.overhead --quick

Fake replicas answer at once (`bench.overhead.fake_replicas`), so what is measured is the
router: CPU seconds of all its processes, what it adds to latency, requests a
second, memory of an open stream. Rates and latencies are those of one machine
that all share, load generator and replicas included: ratios within a run are
what counts. Everything a contender does in vain shows as CPU, nothing that it
gains by choosing a replica well shows here at all.

`direct` has no router. `aiohttp-proxy` is the least a proxy in Python does.
`ours-text` has replicas that tell nothing; `ours-tokens` has replicas whose
tokens and keys it knows, which publish what they store: with prompts never seen
its memo misses, in conversations it hits. `picker` and `picker-text` are Envoy and
our picker together, `envoy` is Envoy alone. `bare-picker` is Envoy with a picker
that gives one answer to all: what asking costs. `ours-full` has a full queue and
answers every request with 429: what refusing costs, compared with `ours-text`.
`ours-text-no-causes` and `ours-tokens-no-causes` do not find out why tokens were computed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.command import positive, shown_command, write_report
from bench.overhead import contenders
from bench.overhead.cases import DEFAULT, MODEL_DIRECTORY, Case, cases
from bench.overhead.report import as_json, case_figures, table
from bench.overhead.rounds import Results, prepare, run_round
from bench.replica.model import make_model
from bench.ttft import BenchError, machine

_EVENTS: Final = 200
_BUSY_SHARE: Final = 0.3
"""Load average a core, before anything is started, from which on latencies are others' too."""
_QUICK_CASES: Final = ("1k-slow", "1k-piece", "conversation-piece")
_QUICK_SHARE: Final = 4
_QUICK_STREAMS: Final = 40
_QUICK_EVENTS: Final = 50


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that are asked for, smaller with ``--quick``."""
    if not arguments.quick:
        names = arguments.case or DEFAULT
        return [each for each in cases(arguments.streams, _EVENTS) if each.name in names]
    names = arguments.case or _QUICK_CASES
    return [
        each if each.holds_streams else replace(each, requests=each.requests // _QUICK_SHARE)
        for each in cases(_QUICK_STREAMS, _QUICK_EVENTS)
        if each.name in names
    ]


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure, print the tables, write the report; raise `BenchError`."""
    wanted = chosen_cases(arguments)
    load_average = _load_average()
    results = measured(arguments, wanted)
    for each in wanted:
        print(table(each, case_figures(results, each, arguments.contender)), end="\n\n")
    for name, why in results.why_not.items():
        print(f"{name} was left out: {why}")
    if arguments.json:
        head = {"command": command, "load_average": load_average}
        write_report(arguments.json, head | report(arguments, results, wanted))


def _load_average() -> float:
    """Return how many processes want a core now, and say so where that is others' work."""
    found = os.getloadavg()[0]
    if found > _BUSY_SHARE * (os.cpu_count() or 1):
        print(f"others are at work on this machine: load average {found:.1f}", file=sys.stderr)
    return found


def measured(arguments: argparse.Namespace, wanted: Sequence[Case]) -> Results:
    """Make the prompts and run all rounds; raise `BenchError`."""
    known = contenders.contenders(contenders.PeersPython(arguments.peers_python))
    wanted_contenders = {name: known[name] for name in arguments.contender}
    telling = any(each.needs_events for each in wanted_contenders.values())
    tokenizer = arguments.tokenizer or make_model(MODEL_DIRECTORY)
    results = Results()
    with tempfile.TemporaryDirectory() as made:
        print("making the prompts", file=sys.stderr)
        prepared = prepare(Path(made), wanted, tokenizer, telling=telling, seed=arguments.seed)
        for number in range(1 if arguments.quick else arguments.rounds):
            run_round(
                number,
                wanted_contenders,
                wanted,
                prepared,
                results,
                connections=arguments.connections,
            )
    return results


def report(
    arguments: argparse.Namespace, results: Results, wanted: Sequence[Case]
) -> dict[str, object]:
    """Return every figure, and what it must be read with, ready for JSON."""
    return {
        "what": "what a router itself costs before replicas that answer at once",
        "machine": machine(),
        "peers": list(contenders.PACKAGES),
        "connections": arguments.connections,
        "tokenizer": "of bench.replica.model" if arguments.tokenizer is None else "given",
        "left_out": results.why_not,
        "cases": as_json(results, wanted, arguments.contender),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [each.name for each in cases(1, 1)]
    known = list(contenders.contenders(contenders.PeersPython(None)))
    parser = argparse.ArgumentParser(
        prog="bench.overhead", description="Measure what a router itself costs."
    )
    parser.add_argument(
        "--case",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"of {', '.join(names)} (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=known,
        default=contenders.DEFAULT,
        metavar="NAME",
        help=f"of {', '.join(known)} (default: {', '.join(contenders.DEFAULT)})",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--streams",
        type=positive,
        default=200,
        help="slow ones open at once (default: %(default)s)",
    )
    parser.add_argument(
        "--connections",
        type=positive,
        default=64,
        help="where requests have no pace (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="of the telling replicas' model (default: a small byte-level BPE, made once)",
    )
    parser.add_argument(
        "--peers-python", type=Path, help="interpreter that has the peers (default: installed)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one small round, to see that all works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the report; return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    try:
        run(_arguments(argv), shown_command("bench.overhead", given))
    except BenchError as error:
        print(f"bench.overhead: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
