"""Each contender in model time beside the program that it stands for, on the clock.

    python -m bench.replay.check --workload rounds --requests 200 --seeds 3 --json out.json

The same sessions go to a real router before a simulated fleet, and in model time to its
rule (to our own code, for ours) before the same machines. What a rule is worth as a
baseline is the ratio of the two, with its interval over seeds.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.command import positive, write_report
from bench.discrete.contenders import play
from bench.discrete.play import FleetOptions as ModelOptions
from bench.proof.statistics import Estimate, ratio
from bench.record import Record
from bench.replay.__main__ import contenders
from bench.replay.cases import WORKLOADS, Case, machine_of
from bench.replay.contenders import peers
from bench.replay.fleet import FleetOptions
from bench.replay.run import run_contender
from bench.ttft import BenchError, machine, percentile

PROGRAMS: Final = {
    "ours": "ours-ttft",
    "sglang-cache-aware": "sglang-cache-aware",
    "vllm-cache-aware-tuned": "vllm-cache-aware",
    "vllm-kv-aware": "vllm-kv-aware",
    "vllm-kv-aware-sessions": "vllm-kv-aware-sessions",
    "power-of-two": "vllm-power-of-two",
    "consistent-hash": "vllm-consistent-hash",
    "sticky-least-loaded": "vllm-sticky-least-loaded",
    "round-robin": "vllm-round-robin",
}
"""By the contender's name in model time that of the program."""

FIGURES: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "mean": lambda ttfts: sum(ttfts) / len(ttfts),
    "p50": lambda ttfts: percentile(ttfts, 0.5),
    "p90": lambda ttfts: percentile(ttfts, 0.9),
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One contender: model time over the clock, paired by seed."""

    contender: str
    program: str
    ratios: dict[str, Estimate]
    hits_clock: float
    hits_model: float
    errors: int


def compare(
    name: str, case: Case, options: Sequence[FleetOptions], python: Path | None
) -> Compared:
    """Run one contender both ways with each of the options (a seed each).

    Raises `BenchError` where the program cannot be run.
    """
    program = contenders(peers.PeersPython(python))[PROGRAMS[name]]
    assert program is not None
    clock: list[list[Record]] = []
    model: list[list[Record]] = []
    for each in options:
        work = case.work(each, None)
        run = run_contender(program, work, each, None)
        if run.figures.why_not is not None:
            raise BenchError(f"{program.name}: {run.figures.why_not}")
        fleet = ModelOptions(replicas=each.replicas, machine=machine_of(each), seed=each.seed)
        clock.append(list(run.records))
        model.append(work.measured(play(name, work.sessions, fleet).records))
    found = {}
    for figure, of in FIGURES.items():
        told = ratio([of(_ttfts(run)) for run in model], [of(_ttfts(run)) for run in clock])
        assert told is not None
        found[figure] = told
    return Compared(
        contender=name,
        program=program.name,
        ratios=found,
        hits_clock=_hits(clock),
        hits_model=_hits(model),
        errors=sum(not each.ok for run in [*clock, *model] for each in run),
    )


def _ttfts(records: Sequence[Record]) -> list[float]:
    return [each.ttft_s for each in records if each.ttft_s is not None]


def _hits(runs: Sequence[Sequence[Record]]) -> float:
    done = [each for run in runs for each in run if each.cached_tokens]
    tokens = sum(each.prompt_tokens for each in done)
    return sum(sum(each.cached_tokens.values()) for each in done) / tokens if tokens else 0.0


def _line(each: Compared) -> str:
    told = "  ".join(
        f"{name} {one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
        for name, one in each.ratios.items()
    )
    hits = f"hits {each.hits_model:.1%} for {each.hits_clock:.1%}"
    return f"{each.contender:<24} {told}  {hits}  {each.errors} errors"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.replay.check", description="Compare contenders in model time with programs."
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="rounds")
    parser.add_argument("--load", type=float, default=0.7, help="real load (default: %(default)s)")
    parser.add_argument("--requests", type=positive, default=200, help="reported of each run")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--replicas", type=positive, default=4)
    parser.add_argument("--speed", type=float, default=2.0, help="model seconds in one")
    parser.add_argument("--contender", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--peers-python", type=Path, help="interpreter that has the peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print a line for each contender; return the exit code."""
    arguments = _arguments(argv)
    case = Case(
        workload=arguments.workload,
        cpu="equal",
        load=arguments.load,
        requests=arguments.requests,
    )
    options = [
        FleetOptions(replicas=arguments.replicas, speed=arguments.speed, cpu="equal", seed=seed)
        for seed in range(1, arguments.seeds + 1)
    ]
    found: list[Compared] = []
    print(f"model time over the clock: {case.title}, {arguments.requests} requests reported")
    try:
        for name in arguments.contender:
            found.append(compare(name, case, options, arguments.peers_python))
            print(_line(found[-1]), flush=True)
    except BenchError as error:
        print(f"bench.replay.check: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        report = {
            "what": "TTFT in model time over that on the clock, the same sessions and machines",
            "machine": machine(),
            "case": asdict(case),
            "compared": [asdict(each) for each in found],
        }
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
