"""Whether a replayed request log agrees with what was recorded, in model time.

    python -m bench.discrete.replayed
    python -m bench.discrete.replayed --json bench/results/replay.json

A fleet serves a workload, and its router's log is written as `warmroute serve` writes it, with
hashes of prompts. The log is then played as ``warmroute replay`` does: in a fleet of the same
machines, which knows of the prompts only these hashes, of the sessions only their pauses, and whose
steps vary otherwise. TTFT must agree within 15% at p50 and p90. Two fleets are played, which differ
in size and speeds.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.command import origin, positive, write_report
from bench.discrete.play import Contender, FleetOptions, play_with
from bench.proof.cases import FIRST_SEED
from bench.ttft import BenchError
from bench.workloads.offered import offered
from replay.our_router import OurRouter, Settings
from replay.player import Figures, Player, recorded_figures
from replay.recorded import read_log
from replay.replica import ModelReplica
from replay.requests import Sent
from router.fleet.cost_model import Quantiles
from router.index.prompt_keys import KeyShape, PromptKeyCache
from router.record.prompt_hashes import PromptHashes
from router.record.records import Outcome, RequestRecord
from router.record.request_log import json_line
from simulator.model.replica_machine import Machine, Rates, Shape
from warmroute_common.keys import HashScheme

_BAR: Final = 0.15
_EPOCH_S: Final = 1_700_000_000.0
"""When the log begins; a log has times of day."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A fleet and what it serves."""

    workload: str
    load: float
    requests: int
    replicas: int
    machine: Machine


FLEETS: Final[Mapping[str, Fleet]] = {
    "chats on 4 fast replicas": Fleet(
        workload="conversation",
        load=0.7,
        requests=200,
        replicas=4,
        machine=Machine(shape=Shape(gpu_tokens=300_000), cpu_tokens=600_000),
    ),
    "chats on 6 slow replicas, without a disk": Fleet(
        workload="conversation",
        load=0.6,
        requests=200,
        replicas=6,
        machine=Machine(
            shape=Shape(gpu_tokens=600_000, block_tokens=256, max_batched_tokens=2_048),
            rates=Rates(
                prefill_tokens_per_s=4_000.0,
                step_s=0.012,
                attention_tokens=60_000.0,
                load_tokens_per_s=60_000.0,
            ),
            cpu_tokens=1_200_000,
            disk_tokens=0,
        ),
    ),
}


class RecordingRouter:
    """Our router, which writes its request log."""

    def __init__(self, replicas: Sequence[ModelReplica], lines: list[bytes]) -> None:
        shape = replicas[0].machine.shape
        self._router = OurRouter(replicas, Settings())
        self._lines = lines
        self._shape = KeyShape(
            scheme=HashScheme(),
            block_tokens=shape.block_tokens,
            blocks_per_chunk=shape.blocks_per_chunk,
        )

    async def answer(self, sent: Sent) -> None:
        """Have a request answered, and write its line."""
        await self._router.answer(sent)
        self._lines.append(self._line(sent).encode())

    def _line(self, sent: Sent) -> str:
        told = sent.record
        total_s = told.total_s or 0.0
        keys = PromptKeyCache(sent.prompt).of(self._shape, {})
        first_s = told.ttft_s if sent.streamed else total_s
        record = RequestRecord(
            request_id=str(told.number),
            endpoint="/v1/completions",
            model="model",
            started_s=told.sent_s,
            ended_s=told.sent_s + total_s,
            prompt_tokens=sent.prompt.token_count,
            prompt_hashes=PromptHashes.of(keys, sent.session),
            streamed=sent.streamed,
            first_byte_s=None if first_s is None else told.sent_s + first_s,
            cached_tokens=sum(told.cached_tokens.values()) if told.ok else None,
            output_tokens=sent.output_tokens if told.ok else None,
            answer_tokens=sent.output_tokens if told.ok else None,
            status=told.status,
        )
        record.end(Outcome.OK if told.ok else Outcome.REFUSED, error=told.error)
        return json_line(record, _EPOCH_S + record.ended_s)

    def counts(self) -> dict[str, float]:
        """Return what it counted."""
        return self._router.counts()

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._router.stop()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One recorded log, and its replay."""

    fleet: str
    seed: int
    log_bytes_per_request: float
    recorded: Figures
    replayed: Figures

    @property
    def errors(self) -> dict[str, float]:
        """How far the replay is from what was recorded, as a part of that, by quantile."""
        return {
            f"{name}_{quantile}": getattr(theirs, quantile) / getattr(ours, quantile) - 1.0
            for name in ("ttft", "tpot")
            if isinstance(ours := getattr(self.recorded, name), Quantiles)
            and isinstance(theirs := getattr(self.replayed, name), Quantiles)
            for quantile in ("p50", "p90")
        }

    @property
    def is_met(self) -> bool:
        """Whether TTFT agrees."""
        errors = self.errors
        return all(abs(errors[each]) <= _BAR for each in ("ttft_p50", "ttft_p90"))


def record(fleet: Fleet, seed: int) -> list[bytes]:
    """Return the lines of the log of a fleet that serves its workload."""
    found = offered(
        fleet.workload,
        load=fleet.load,
        requests=fleet.requests,
        seed=seed,
        replicas=fleet.replicas,
        machine=fleet.machine,
    )
    lines: list[bytes] = []
    contender = Contender(make=lambda replicas, _: RecordingRouter(replicas, lines))
    options = FleetOptions(replicas=fleet.replicas, machine=fleet.machine, seed=seed)
    play_with(contender, found.sessions, options)
    return lines


def agreement(name: str, fleet: Fleet, seed: int) -> Agreement:
    """Record a log and play it again."""
    lines = record(fleet, seed)
    log = read_log(lines)
    player = Player(machine=fleet.machine, replicas=fleet.replicas, seed=seed + 1)
    return Agreement(
        fleet=name,
        seed=seed,
        log_bytes_per_request=sum(map(len, lines)) / len(lines),
        recorded=recorded_figures(log.requests),
        replayed=player.play(log.requests),
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.discrete.replayed", description=__doc__)
    parser.add_argument("--seeds", type=positive, default=3, help="seeds of each fleet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Record, play, print and write; return the exit code: 0 if all agree."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    found: list[Agreement] = []
    try:
        head = origin("bench.discrete.replayed", given, arguments.json)
        for name, fleet in FLEETS.items():
            for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds):
                found.append(agreement(name, fleet, seed))
                print(_shown(found[-1]), flush=True)
    except BenchError as error:
        print(f"bench.discrete.replayed: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        write_report(
            arguments.json,
            {
                "what": "replayed logs, compared with what was recorded, in model time",
                **head,
                "fleets": {name: asdict(fleet) for name, fleet in FLEETS.items()},
                "agreements": [
                    asdict(each) | {"errors": each.errors, "is_met": each.is_met} for each in found
                ],
            },
        )
    return 0 if all(each.is_met for each in found) else 1


def _shown(each: Agreement) -> str:
    errors = ", ".join(f"{name} {error:+.1%}" for name, error in each.errors.items())
    met = "met" if each.is_met else "missed"
    hits = f"hits {each.recorded.hit_share or 0:.1%} and {each.replayed.hit_share or 0:.1%}"
    return f"{met:<8}{each.fleet}, seed {each.seed}: {errors}, {hits}"


if __name__ == "__main__":
    sys.exit(main())
