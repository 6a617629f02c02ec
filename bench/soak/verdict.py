"""What must hold of a soak, and whether it does. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.soak.ledger import Ledger, Outcome
from bench.soak.watch import Sample, growth, more_fds

MOST_GROWTH: Final = 0.05
MOST_MORE_FDS: Final = 8
"""Clients come and go by chance; a file that is left open at each fault would be more."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str


def of_requests(ledger: Ledger) -> list[Verdict]:
    """Judge how requests have ended."""
    wanted = {
        "no request lost that could be retried": Outcome.LOST,
        "no wrong byte": Outcome.WRONG,
        "no answer cut without reason": Outcome.UNEXPLAINED,
        "no request held whose body never comes": Outcome.HELD,
    }
    found = {what: ledger.total(outcome) for what, outcome in wanted.items()}
    return [
        *(Verdict(what=what, holds=not count, found=str(count)) for what, count in found.items()),
        at_least_one("answers that came whole", ledger.total(Outcome.WHOLE)),
        at_least_one("replicas were in trouble", len(ledger.troubles)),
    ]


def of_processes(samples: Mapping[str, Sequence[Sample]], settling_s: float) -> list[Verdict]:
    """Judge memory and open files once tables have filled."""
    found = []
    for name, each in samples.items():
        settled = [sample for sample in each if sample.at_s >= settling_s]
        grown, fds = growth(settled), more_fds(settled) if settled else 0
        found += [
            Verdict(
                what=f"own memory of {name} grows by less than {MOST_GROWTH:.0%}",
                holds=bool(settled) and grown < MOST_GROWTH,
                found=f"{grown:+.1%} over {len(settled)} samples",
            ),
            Verdict(
                what=f"open files of {name} do not grow by more than {MOST_MORE_FDS}",
                holds=fds <= MOST_MORE_FDS,
                found=f"{fds:+g}",
            ),
        ]
    return found


def of_the_end(in_flight: Mapping[str, float], busy: Sequence[str]) -> list[Verdict]:
    """Judge what is left when all clients have gone: counts by name, replicas that still work."""
    left = {name: count for name, count in in_flight.items() if count}
    return [
        Verdict(what="in-flight counts zero at the end", holds=not left, found=str(left or 0)),
        Verdict(
            what="replicas compute for no client that has gone",
            holds=not busy,
            found=", ".join(busy) or "none",
        ),
    ]


def of_logs(bad_lines: Sequence[str]) -> list[Verdict]:
    """Judge what the router has logged."""
    found = "; ".join(bad_lines[:3]) or "none"
    return [Verdict(what="no traceback in a log", holds=not bad_lines, found=found)]


def of_reloads(sent: int, seen: int, bad: int, refused: int) -> list[Verdict]:
    """Judge whether each new configuration was taken on, and each that cannot be refused."""
    return [
        Verdict(what="configurations taken on", holds=seen == sent, found=f"{seen} of {sent}"),
        Verdict(what="bad ones refused", holds=refused == bad, found=f"{refused} of {bad}"),
    ]


def at_least_one(what: str, count: int) -> Verdict:
    """Judge whether something has come about at all: else the run has shown nothing."""
    return Verdict(what=what, holds=count > 0, found=str(count))
