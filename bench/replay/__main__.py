"""Routers compared: one workload, one simulated fleet, restarted clean for each of them.

    python -m bench.replay --trace conversation_trace.jsonl --load 0.8 --cpu scarce
    python -m bench.replay --workload rounds --requests 500 --contender ours-ttft oracle
    python -m bench.replay --matrix workloads --trace conversation_trace.jsonl

Contenders are ours with each policy, sglang-router and vllm-router (installed
on demand into an environment of their own), and two bounds: an oracle that
knows the true state of every replica, and one replica with an infinite cache
and no queue. All times are model seconds: the fleet runs ``--speed`` times
faster than the clock.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import orjson

from bench.command import positive, write_report
from bench.replay.bound import REPLICA
from bench.replay.cases import (
    MATRICES,
    REPORTED_REQUESTS,
    TRACE_WORKLOAD,
    WORKLOADS,
    Case,
    matrix,
)
from bench.replay.contenders import ours, peers
from bench.replay.contenders.contender import Contender
from bench.replay.fleet import CPU_TOKENS, DISK_TOKENS_PER_S, FleetOptions
from bench.replay.report import costliest, costliest_table, table
from bench.replay.run import CaseResult, run_bound, run_contender
from bench.ttft import BenchError, machine

ORACLE: Final = "oracle"
OURS: Final = "ours-ttft"


def contenders(python: peers.PeersPython) -> dict[str, Contender | None]:
    """Return all contenders by name, in the table's order; None: the computed bound."""
    known = [
        *ours.contenders(),
        *peers.contenders(python),
        Contender(name=ORACLE, launch=None),
    ]
    return {each.name: each for each in known} | {REPLICA: None}


def replay(
    case: Case, chosen: Mapping[str, Contender | None], arguments: argparse.Namespace
) -> CaseResult:
    """Run every contender in one case, telling of each as it ends; raise `BenchError`."""
    options = _fleet_options(case, arguments)
    traces = {TRACE_WORKLOAD: arguments.trace, "agents": arguments.agents}
    work = case.work(options, traces.get(case.workload))
    result = CaseResult(case=case, work=work)
    print(
        f"== {case.title}: {work.requests} requests and {work.not_reported} around them",
        file=sys.stderr,
    )
    for name, contender in chosen.items():
        run = (
            run_bound(work, options)
            if contender is None
            else run_contender(contender, work, options, arguments.logs)
        )
        result.runs[name] = run
        mean_s = run.figures.ttft_mean_s
        told = run.figures.why_not or ("-" if mean_s is None else f"TTFT mean {mean_s:.3f} s")
        print(f"{name}: {told}, {run.figures.errors} errors", file=sys.stderr)
        if run.figures.first_error:
            print(f"  the first: {run.figures.first_error}", file=sys.stderr)
    if OURS in result.runs and ORACLE in result.runs:
        mine, oracle = result.runs[OURS].records, result.runs[ORACLE].records
        result.costly = costliest(mine, oracle, arguments.costliest, speed=options.speed)
    return result


def _fleet_options(case: Case, arguments: argparse.Namespace) -> FleetOptions:
    return FleetOptions(
        replicas=arguments.replicas,
        speed=arguments.speed,
        cpu=case.cpu,
        disk=case.disk,
        seed=arguments.seed,
    )


def _show(result: CaseResult, arguments: argparse.Namespace) -> None:
    """Print one case's tables and write its records and plots, as far as they are wanted."""
    title = f"{result.case.title}: {result.work.requests} requests"
    print(table(title, [each.figures for each in result.runs.values()]))
    if result.costly:
        print(f"\nwhere {OURS} lost most to the {ORACLE}:\n{costliest_table(result.costly)}")
    print()
    records = {name: each.records for name, each in result.runs.items() if each.records}
    if arguments.records:
        lines = [
            orjson.dumps({"case": result.case.title, "contender": name, **asdict(each)})
            for name, kept in records.items()
            for each in kept
        ]
        arguments.records.parent.mkdir(parents=True, exist_ok=True)
        with arguments.records.open("ab") as file:
            file.write(b"\n".join(lines) + b"\n")
    if arguments.plots:
        # matplotlib takes its time, and only plots need it.
        from bench.replay.plots import write_plots  # noqa: PLC0415

        for path in write_plots(arguments.plots, title, records):
            print(f"written to {path}")


def report(
    command: Sequence[str], arguments: argparse.Namespace, results: Sequence[CaseResult]
) -> dict[str, object]:
    """Return every figure with the command, the machine and all options, ready for JSON."""
    options = _fleet_options(results[0].case, arguments)
    return {
        "what": "routers in front of one simulated fleet; times in model seconds",
        "command": shlex.join(command),
        "machine": {**machine(), "load_average": os.getloadavg()},
        "peers": list(peers.PACKAGES),
        "fleet": asdict(options)
        | {
            "cpu": CPU_TOKENS,
            "disk": DISK_TOKENS_PER_S,
            "trace": arguments.trace and arguments.trace.name,
            "agents": arguments.agents and arguments.agents.name,
        },
        "cases": [each.as_json() for each in results],
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = list(contenders(peers.PeersPython(None)))
    parser = argparse.ArgumentParser(
        prog="bench.replay", description="Compare routers in front of one simulated fleet."
    )
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--workload", choices=WORKLOADS, help=f"default: {TRACE_WORKLOAD} with --trace, else rounds"
    )
    workload.add_argument(
        "--trace", type=Path, metavar="FILE", help="conversation, in Mooncake's form"
    )
    workload.add_argument("--agents", type=Path, metavar="FILE", help="agents, in AIPerf's form")
    workload.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"report N after the warm-up (default: {REPORTED_REQUESTS}); with --time-scale the "
        "first N of the trace (default: all)",
    )
    pace = workload.add_mutually_exclusive_group()
    pace.add_argument(
        "--load",
        type=_above_zero,
        default=0.8,
        help="prefill that one infinite cache for all would leave, as a share of what the fleet "
        "prefills (default: %(default)s)",
    )
    pace.add_argument("--time-scale", type=_above_zero, help="factor on the trace's times")
    workload.add_argument(
        "--matrix",
        choices=MATRICES,
        help="a list of workloads and regimes, instead of one (--workload picks one of them, "
        "--requests still counts)",
    )
    workload.add_argument("--seed", type=int, default=1, help="of all that is generated")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=positive, default=8, help="default: %(default)s")
    fleet.add_argument(
        "--speed", type=_above_zero, default=4.0, help="model seconds in one (default: %(default)s)"
    )
    fleet.add_argument(
        "--cpu",
        choices=CPU_TOKENS,
        default="scarce",
        help="RAM of a replica (default: %(default)s)",
    )
    fleet.add_argument(
        "--disk", choices=DISK_TOKENS_PER_S, default="fast", help="its speed (default: %(default)s)"
    )
    who = parser.add_argument_group("contenders")
    who.add_argument(
        "--contender",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"of {', '.join(names)} (default: all)",
    )
    who.add_argument(
        "--peers-python", type=Path, help="interpreter that has the peers (default: installed)"
    )
    who.add_argument(
        "--peers-directory",
        type=Path,
        default=peers.DEFAULT_DIRECTORY,
        help="environment to make for the peers (default: %(default)s)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, metavar="JSON", help="write every figure there")
    out.add_argument("--records", type=Path, metavar="JSONL", help="write every request there")
    out.add_argument("--plots", type=Path, metavar="DIR", help="write plots there")
    out.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' last logs")
    out.add_argument(
        "--costliest",
        type=int,
        default=20,
        metavar="N",
        help=f"show the N requests on which {OURS} lost most to the {ORACLE}",
    )
    return parser.parse_args(argv)


def _above_zero(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.matrix is None:
        return [
            Case(
                workload=arguments.workload or (TRACE_WORKLOAD if arguments.trace else "rounds"),
                cpu=arguments.cpu,
                disk=arguments.disk,
                load=arguments.load,
                time_scale=arguments.time_scale,
                requests=arguments.requests,
            )
        ]
    return matrix(arguments.matrix, workload=arguments.workload, requests=arguments.requests)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the tables, write JSON and plots; return the exit code."""
    arguments = _arguments(argv)
    known = contenders(peers.PeersPython(arguments.peers_python, arguments.peers_directory))
    chosen = {name: known[name] for name in arguments.contender or known}
    if arguments.records:
        arguments.records.unlink(missing_ok=True)
    command = ["python", "-m", "bench.replay", *(sys.argv[1:] if argv is None else argv)]
    results: list[CaseResult] = []
    code = 0
    try:
        for case in _cases(arguments):
            # Where one case of a matrix cannot be, the others still can.
            try:
                results.append(replay(case, chosen, arguments))
            except BenchError as error:
                code = _failed(error)
                continue
            _show(results[-1], arguments)
            if arguments.out:
                write_report(arguments.out, report(command, arguments, results))
    except BenchError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130
    return code


def _failed(error: BenchError) -> int:
    print(f"bench.replay: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
