"""Calibrate the simulated replica: the same requests to it and to a real one.

    python -m bench.calibration --json bench/results/calibration.json

Starts a real vLLM replica with the cache engine inside and, round by round, takes
its times (prompts of several lengths, decoding, a prefix in each tier) and sends
it the requests to be compared: cold ones, hits in each tier, two at once, one
beside others that decode. Then starts a simulated replica with the rates that
follow from the times, and sends it the same requests. The cached tokens must be
equal, the TTFT within 20%.

Wants a machine that does nothing else, and takes some minutes.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench.calibration import kinds as calibrate_kinds
from bench.calibration.kinds import KINDS, Prompts
from bench.calibration.rates import FittedRates, Times, fit
from bench.calibration.replica import SHAPE, start_real, start_simulated
from bench.calibration.report import Row, as_json, rows, table
from bench.calibration.target import Asked, Target
from bench.command import positive, write_report
from bench.replica.local import CannotStartError
from bench.replica.tiers import NotThereError
from bench.ttft import BenchError, machine
from router.launch.processes import ChildFailedError, ProcessGroup

_COLD_TOKENS: Final = (8192, 4096, 2048, 1024, 512, 64)
"""The long ones first: a short one that came soon after what leaves much to be stored, or after
a hit on disk, was measured at up to three times its time."""
_PREFIX_TOKENS: Final = 8_192
_DECODED_TOKENS: Final = 40
_AT_ONCE: Final = (1, 4)
_SETTLE_S: Final = 1.0
_FIRST_COMPARED_SEED: Final = 1_000_000


def say(text: str) -> None:
    """Tell how far it is; the table alone goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def warm_up(target: Target) -> None:
    """Have everything done once: the first time of each is slower."""
    prompts = Prompts(seed=-1)
    for kind in KINDS.values():
        kind(target, prompts)


@dataclass
class Measured:
    """The real replica's times, round by round."""

    cold_s: dict[int, list[float]] = field(
        default_factory=lambda: {tokens: [] for tokens in _COLD_TOKENS}
    )
    token_s: dict[int, list[float]] = field(
        default_factory=lambda: {count: [] for count in _AT_ONCE}
    )
    hits: list[Mapping[str, Asked]] = field(default_factory=list)

    def take(self, target: Target, prompts: Prompts) -> None:
        """Take every time once more."""
        self.hits.append(calibrate_kinds.tiers(target, prompts, _PREFIX_TOKENS))
        for count, times_s in self.token_s.items():
            times_s.append(_token_s(target, prompts, count))
        for tokens, times_s in self.cold_s.items():
            times_s.append(target.ask(prompts.next(tokens)).ttft_s)

    def times(self) -> Times:
        """Return the medians."""

        def median_s(row: str) -> float:
            return statistics.median(each[row].ttft_s for each in self.hits)

        return Times(
            cold_s={tokens: statistics.median(each) for tokens, each in self.cold_s.items()},
            token_s={count: statistics.median(each) for count, each in self.token_s.items()},
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


def ask_all(target: Target, *, number: int, seed: int) -> dict[str, Asked]:
    """Send a round of the requests that are compared: the same ones to whoever is asked."""
    answers: dict[str, Asked] = {}
    for index, kind in enumerate(KINDS.values()):
        prompts = Prompts(_FIRST_COMPARED_SEED * (seed + 1) + 100 * number + index)
        answers.update(kind(target, prompts))
    return answers


def report(
    arguments: argparse.Namespace, times: Times, rates: FittedRates, found: Sequence[Row]
) -> dict[str, object]:
    """Return every figure with the command and the machine, ready for JSON."""
    return {
        "what": "the simulated replica beside a real one: the same requests, hits and TTFT",
        "command": f"python -m bench.calibration --rounds {arguments.rounds} "
        f"--seed {arguments.seed}",
        "machine": machine(),
        "model": "of bench.replica.model, 27 million parameters",
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
        real = Target(start_real(group, work), settle_s=_SETTLE_S)
        warm_up(real)
        measured, prompts = Measured(), Prompts(arguments.seed)
        of_real: list[dict[str, Asked]] = []
        for number in range(arguments.rounds):
            say(f"the real replica, round {number + 1} of {arguments.rounds}")
            # In turn, not all of one and then all of the other: the machine is now faster,
            # now slower, for minutes, and both must be of the same minutes.
            measured.take(real, prompts)
            of_real.append(ask_all(real, number=number, seed=arguments.seed))
        times = measured.times()
        rates = fit(times, batched_tokens=SHAPE.max_batched_tokens)
        say(f"rates: {rates}")
        simulated = Target(start_simulated(group, work, rates), settle_s=_SETTLE_S)
        warm_up(simulated)
        of_simulated: list[dict[str, Asked]] = []
        for number in range(arguments.rounds):
            say(f"the simulated replica, round {number + 1} of {arguments.rounds}")
            of_simulated.append(ask_all(simulated, number=number, seed=arguments.seed))
        return times, rates, rows(of_real, of_simulated)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.calibration",
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
    except (
        ChildFailedError,
        CannotStartError,
        BenchError,
        NotThereError,
        OSError,
        ValueError,
    ) as error:
        say(f"bench.calibration: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(found))
    if arguments.json:
        write_report(arguments.json, report(arguments, times, rates, found))
    return 0 if all(row.has_same_hits and row.is_close for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
