"""Goodput before, during and after an overload, in model time.

    python -m bench.discrete.overload
    python -m bench.discrete.overload --workload conversation --permitted-wait 60
    python -m bench.discrete.overload --json bench/results/overload.json

A fleet serves a workload at a moderate load. Then sessions start several times as often for some
minutes, and then as often as before. Goodput is the requests per second whose first token came
within the workload's bound; a request counts in the phase in which it was due. Several peaks are
played: as the offered load grows, goodput must not fall. After the peak as many requests must be in
time as without one: the same sessions are played at the moderate load for that. Refused clients do
not try again.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from bench.command import origin, positive, write_report
from bench.discrete.play import Contender, FleetOptions, play_with
from bench.proof.case import MACHINE
from bench.proof.cases import FIRST_SEED, TTFT_BOUND_S
from bench.ttft import BenchError, percentile
from bench.workloads.offered import GENERATED, offered
from bench.workloads.session import Session
from replay.our_router import OurRouter, Settings, with_sections
from replay.record import Record
from router.config.settings import AdmissionConfig
from simulator.model.replica_machine import Machine

PEAKS: Final = (0.95, 1.5, 3.0)
"""Loads of the middle phase; the last one is the overload."""
_LEAST_SHARE: Final = 0.9
"""The overload must reach this share of the highest goodput."""
_LEAST_AFTER: Final = 0.98
"""The phase after the peak must reach this part of the share in time without a peak."""
_REFUSED: Final = 429
_PROBED: Final = 400
"""Requests by which the rate of a workload is found."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is played."""

    workload: str
    load: float = 0.7
    """Before and after the peak."""
    phase_s: float = 300.0
    bound_s: float
    """Of TTFT, for goodput."""
    permitted_wait_s: float
    """`admission.max_wait_s`: how long clients permit a request to wait."""
    replicas: int = 4
    seed: int = FIRST_SEED

    @property
    def machine(self) -> Machine:
        """Size and speed of each replica."""
        return replace(MACHINE, cpu_tokens=MACHINE.shape.gpu_tokens)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What became of the requests that were due in one phase."""

    name: str
    due_per_s: float
    goodput_per_s: float
    in_time_share: float
    """Share of the requests that were due."""
    refused_share: float
    failed_share: float
    """Without the refused ones."""
    ttft_p50_s: float | None
    """Only answered requests."""
    ttft_p90_s: float | None
    refused_after_p90_s: float | None
    """How long refused requests had waited."""


def with_peak(
    sessions: Sequence[Session], begin_s: float, factor: float, length_s: float
) -> list[Session]:
    """Return the sessions with starts ``factor`` times as dense from ``begin_s`` for ``length_s``.

    Pauses inside sessions are left as they are.
    """

    def moved(start_s: float) -> float:
        if start_s <= begin_s:
            return start_s
        taken_s = min(start_s - begin_s, length_s * factor)
        return start_s - taken_s + taken_s / factor

    return [replace(each, start_s=moved(each.start_s)) for each in sessions]


def play_peak(plan: Plan, peak: float) -> list[Phase]:
    """Play a workload with a peak of this load; return its three phases."""
    factor = peak / plan.load
    sessions, begin_s = _sessions(plan, factor)
    records = _played(plan, with_peak(sessions, begin_s, factor, plan.phase_s))
    return [
        phase(name, records, begin_s + at * plan.phase_s, plan)
        for name, at in (("before", -1), ("peak", 0), ("after", 1))
    ]


def play_without(plan: Plan, peak: float) -> Phase:
    """Play the sessions of a peak at the moderate load; return the phase that follows the peak."""
    factor = peak / plan.load
    sessions, begin_s = _sessions(plan, factor)
    return phase("steady", _played(plan, sessions), begin_s + factor * plan.phase_s, plan)


def _played(plan: Plan, sessions: Sequence[Session]) -> Sequence[Record]:
    admission = AdmissionConfig(max_wait_s=plan.permitted_wait_s)
    settings = with_sections(Settings(), admission=admission)
    contender = Contender(make=lambda replicas, seed: OurRouter(replicas, settings))
    options = FleetOptions(replicas=plan.replicas, machine=plan.machine, seed=plan.seed)
    return play_with(contender, sessions, options, tries=1).records


def _sessions(plan: Plan, factor: float) -> tuple[Sequence[Session], float]:
    """Return enough sessions at the moderate load, and when the peak begins."""

    def at_load(requests: int) -> tuple[Sequence[Session], float, float]:
        made = offered(
            plan.workload,
            load=plan.load,
            requests=requests,
            seed=plan.seed,
            replicas=plan.replicas,
            machine=plan.machine,
        )
        return made.sessions, made.warm_up_s, made.end_s

    _, warm_up_s, end_s = at_load(_PROBED)
    phases = 2.5 + factor
    sessions, warm_up_s, _ = at_load(round(_PROBED * phases * plan.phase_s / (end_s - warm_up_s)))
    return sessions, warm_up_s + plan.phase_s


def phase(name: str, records: Sequence[Record], begin_s: float, plan: Plan) -> Phase:
    """Return what became of the requests that were due in the phase from ``begin_s`` on."""
    due = [each for each in records if begin_s <= each.due_s < begin_s + plan.phase_s]
    if not due:
        raise BenchError(f"no request was due in the phase '{name}': give it more time")
    ttfts_s = [each.ttft_s for each in due if each.ok and each.ttft_s is not None]
    refused = [each for each in due if each.status == _REFUSED]
    in_time = sum(ttft_s <= plan.bound_s for ttft_s in ttfts_s)
    waits_s = [each.total_s for each in refused if each.total_s is not None]
    return Phase(
        name=name,
        due_per_s=len(due) / plan.phase_s,
        goodput_per_s=in_time / plan.phase_s,
        in_time_share=in_time / len(due),
        refused_share=len(refused) / len(due),
        failed_share=sum(not each.ok for each in due) / len(due) - len(refused) / len(due),
        ttft_p50_s=percentile(ttfts_s, 0.5) if ttfts_s else None,
        ttft_p90_s=percentile(ttfts_s, 0.9) if ttfts_s else None,
        refused_after_p90_s=percentile(waits_s, 0.9) if waits_s else None,
    )


def verdict(played: Mapping[float, Sequence[Phase]], steady: Phase) -> list[tuple[bool, str]]:
    """Return for each bar whether it is met, and what was found; the highest peak counts.

    ``steady``: the phase after that peak, had the peak's sessions come at the moderate load.
    """
    goodput = {peak: phases[1].goodput_per_s for peak, phases in played.items()}
    after = played[max(played)][2]
    share = goodput[max(played)] / max(goodput.values()) if any(goodput.values()) else 0.0
    kept = after.in_time_share / steady.in_time_share if steady.in_time_share else 0.0
    return [
        (
            share >= _LEAST_SHARE,
            f"goodput at load {max(played):g} is {100 * share:.0f}% of its maximum "
            f"(at least {100 * _LEAST_SHARE:.0f}%)",
        ),
        (
            kept >= _LEAST_AFTER,
            f"after it {100 * kept:.0f}% as many requests are in time as of the same requests "
            f"without a peak (at least {100 * _LEAST_AFTER:.0f}%)",
        ),
    ]


def _shown(peak: float, each: Phase) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        f"{peak:>5g} {each.name:<8}{each.due_per_s:>8.2f}{each.goodput_per_s:>9.2f}"
        f"{100 * each.in_time_share:>9.1f}%{100 * each.refused_share:>8.1f}%"
        f"{100 * each.failed_share:>7.1f}%"
        f"{seconds(each.ttft_p50_s):>8}{seconds(each.ttft_p90_s):>8}"
        f"{seconds(each.refused_after_p90_s):>12}"
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.discrete.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", choices=tuple(GENERATED), default="unique")
    parser.add_argument("--peak", type=float, nargs="+", default=list(PEAKS), help="loads")
    parser.add_argument(
        "--permitted-wait",
        type=float,
        metavar="S",
        help="seconds that clients permit a request to wait; default: half of the bound",
    )
    parser.add_argument("--bound", type=float, metavar="S", help="of TTFT; default: the workload's")
    parser.add_argument("--phase", type=float, default=300.0, metavar="S", help="length of each")
    parser.add_argument("--replicas", type=positive, default=4)
    parser.add_argument("--seed", type=positive, default=FIRST_SEED)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Play, print and write; return the exit code: 0 if all bars are met."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _arguments(given)
    bound_s = arguments.bound or TTFT_BOUND_S[arguments.workload]
    permitted_s = bound_s / 2 if arguments.permitted_wait is None else arguments.permitted_wait
    plan = Plan(
        workload=arguments.workload,
        phase_s=arguments.phase,
        bound_s=bound_s,
        permitted_wait_s=permitted_s,
        replicas=arguments.replicas,
        seed=arguments.seed,
    )
    try:
        head = origin("bench.discrete.overload", given, arguments.json)
        print(
            f"{plan.workload}, TTFT within {bound_s:g} s, waits of {permitted_s:g} s permitted\n"
            " peak phase      due/s  goodput  in time refused failed  TTFT50  TTFT90  refused p90"
        )
        played = {}
        for peak in arguments.peak:
            played[peak] = play_peak(plan, peak)
            for each in played[peak]:
                print(_shown(peak, each), flush=True)
        steady = play_without(plan, max(played))
        print(_shown(plan.load, steady))
    except BenchError as error:
        print(f"bench.discrete.overload: {error}", file=sys.stderr)
        return 1
    found = verdict(played, steady)
    for is_met, text in found:
        print(f"{'met' if is_met else 'missed':<8}{text}")
    if arguments.json:
        phases = {f"{peak:g}": [asdict(each) for each in played[peak]] for peak in played}
        bars = [{"is_met": is_met, "found": text} for is_met, text in found]
        write_report(
            arguments.json,
            {
                "what": "goodput before, during and after a peak, in model time",
                **head,
                "plan": asdict(plan),
                "by_peak": phases,
                "steady": asdict(steady),
                "bars": bars,
            },
        )
    return 0 if all(is_met for is_met, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
