"""Calibrate the simulated replica: the same requests to it and to a real one.

    python -m bench.calibrate --json bench/results/calibration.json

Starts a real vLLM replica with the cache engine inside and takes its times:
prompts of several lengths, decoding, a prefix in each tier. Starts a simulated
replica with the rates that follow from them. Then sends both the same new
requests, in turn: cold ones, hits in each tier, two at once, one beside others
that decode. The cached tokens must be equal, the TTFT within 20%.

Wants a machine that does nothing else, and takes some minutes.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench import calibrate_kinds
from bench.calibrate_kinds import KINDS, Prompts
from bench.calibrate_rates import FittedRates, Times, fit
from bench.calibrate_replica import SHAPE, start_real, start_simulated
from bench.calibrate_report import Row, as_json, rows, table
from bench.calibrate_target import Asked, Target
from bench.command import positive, write_report
from bench.local import CannotStart
from bench.tiers import NotThere
from bench.ttft import BenchError, machine
from router.processes import ChildFailed, ProcessGroup

_COLD_TOKENS: Final = (64, 512, 1024, 2048, 4096, 8192)
_PREFIX_TOKENS: Final = 8_192
_DECODED_TOKENS: Final = 40
_AT_ONCE: Final = (1, 4)
_FIRST_COMPARED_SEED: Final = 1_000_000


def say(text: str) -> None:
    """Tell how far it is; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def warm_up(target: Target) -> None:
    """Have everything done once: the first time of each is slower."""
    prompts = Prompts(seed=-1)
    for kind in KINDS.values():
        kind(target, prompts)


def measure_times(target: Target, *, rounds: int, seed: int) -> Times:
    """Take the times that the rates are worked out from."""
    cold: dict[int, list[float]] = {tokens: [] for tokens in _COLD_TOKENS}
    tokens_s: dict[int, list[float]] = {count: [] for count in _AT_ONCE}
    hits: list[dict[str, Asked]] = []
    prompts = Prompts(seed)
    for number in range(rounds):
        say(f"measuring the real replica, round {number + 1} of {rounds}")
        for tokens, times_s in cold.items():
            times_s.append(target.ask(prompts.next(tokens)).ttft_s)
        for count, times_s in tokens_s.items():
            times_s.append(_token_s(target, prompts, count))
        hits.append(dict(calibrate_kinds.tiers(target, prompts, _PREFIX_TOKENS)))

    def median_s(row: str) -> float:
        return statistics.median(each[row].ttft_s for each in hits)

    return Times(
        cold_s={tokens: statistics.median(times_s) for tokens, times_s in cold.items()},
        token_s={count: statistics.median(times_s) for count, times_s in tokens_s.items()},
        gpu_s=median_s(calibrate_kinds.GPU),
        cpu_s=median_s(calibrate_kinds.CPU),
        disk_s=median_s(calibrate_kinds.DISK),
        prefix_tokens=_PREFIX_TOKENS,
    )


def _token_s(target: Target, prompts: Prompts, count: int) -> float:
    """Return the time between tokens where ``count`` answers are decoded at once."""
    short = [prompts.next(_DECODED_TOKENS) for _ in range(count)]
    with target.decoding(short[1:]):
        token_s = target.ask(short[0], answer_tokens=_DECODED_TOKENS).token_s
    if token_s is None:
        raise BenchError(f"{target.tiers.name} gave less tokens than asked for")
    return token_s


def compare(real: Target, simulated: Target, *, rounds: int, seed: int) -> list[Row]:
    """Send both the same requests, in turn; return what they took."""
    asked: dict[str, list[dict[str, Asked]]] = {"real": [], "simulated": []}
    for number in range(rounds):
        say(f"comparing, round {number + 1} of {rounds}")
        for answers in asked.values():
            answers.append({})
        for index, kind in enumerate(KINDS.values()):
            for name, target in (("real", real), ("simulated", simulated)):
                prompts = Prompts(_FIRST_COMPARED_SEED * (seed + 1) + 100 * number + index)
                asked[name][-1].update(kind(target, prompts))
    return rows(asked["real"], asked["simulated"])


def report(
    arguments: argparse.Namespace, times: Times, rates: FittedRates, found: Sequence[Row]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    return {
        "what": "the simulated replica beside a real one: the same requests, hits and TTFT",
        "command": f"python -m bench.calibrate --rounds {arguments.rounds} --seed {arguments.seed}",
        "machine": machine(),
        "model": "of bench.model, 27 million parameters",
        "shape": asdict(SHAPE),
        "measured": asdict(times),
        "rates": asdict(rates),
        "kinds": [as_json(row) for row in found],
    }


def run(arguments: argparse.Namespace) -> tuple[Times, FittedRates, list[Row]]:
    """Start, measure, compare and end everything; raise what stood in the way."""
    with tempfile.TemporaryDirectory() as name, ProcessGroup() as group:
        work = Path(name)
        say("starting the real replica")
        real = Target(start_real(group, work))
        warm_up(real)
        times = measure_times(real, rounds=arguments.rounds, seed=arguments.seed)
        rates = fit(times, batched_tokens=SHAPE.max_batched_tokens)
        say(f"rates: {rates}")
        simulated = Target(start_simulated(group, work, rates))
        warm_up(simulated)
        return times, rates, compare(real, simulated, rounds=arguments.rounds, seed=arguments.seed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.calibrate",
        description="Compare the simulated replica with a real one: same requests, same hits.",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and return the exit code: 0 when hits are equal and all TTFTs close."""
    arguments = _arguments(argv)
    try:
        times, rates, found = run(arguments)
    except (ChildFailed, CannotStart, BenchError, NotThere, OSError, ValueError) as error:
        say(f"bench.calibrate: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(found))
    if arguments.json:
        write_report(arguments.json, report(arguments, times, rates, found))
    return 0 if all(row.has_same_hits and row.is_close for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
