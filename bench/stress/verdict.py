"""What must hold of a stress, and whether it does. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.soak.verdict import Verdict, at_least_one, of_processes
from bench.soak.watch import Sample
from bench.stress.inside.lock import Durations, LongHolds
from bench.stress.troubles import Kind

MOST_HELD_NS: Final = 1_000_000
HELD_SHARE: Final = 0.999
_SETTLED_S: Final = 60.0
"""Of a life, beyond the settling, for its memory to be judged."""


@dataclass(kw_only=True)
class Locks:
    """The holds of all engines' locks."""

    held: Durations = field(default_factory=Durations)
    computed: Durations = field(default_factory=Durations)
    waited: Durations = field(default_factory=Durations)
    waited_by_main: Durations = field(default_factory=Durations)
    by_call: dict[str, LongHolds] = field(default_factory=dict)

    def add(self, told: Mapping[str, Any]) -> None:
        """Add what one process has told of its lock."""
        for name in ("held", "computed", "waited", "waited_by_main"):
            getattr(self, name).merge(Durations.from_json(told[name]))
        for call, (count, longest_ns, cpu_ns) in told["by_call"].items():
            noted = self.by_call.setdefault(call, LongHolds())
            noted.count += count
            if longest_ns > noted.longest_ns:
                noted.longest_ns, noted.cpu_ns = longest_ns, cpu_ns

    @property
    def longest_call(self) -> str:
        """The call that held a lock longest."""
        return max(self.by_call, key=lambda call: self.by_call[call].longest_ns, default="none")


def of_bytes(counts: Mapping[str, int]) -> list[Verdict]:
    """Judge what was loaded: sums of `inside.scheduler.Counts`."""
    wrong = counts["wrong_chunks"]
    return [
        Verdict(what="no wrong byte loaded", holds=not wrong, found=f"{wrong} wrong chunks"),
        at_least_one("chunks loaded and compared", counts["loaded_chunks"]),
        at_least_one("of these promoted for their request", counts["promoted_chunks"]),
    ]


def of_ways(engine: Mapping[str, Any], transfer: Mapping[str, int]) -> list[Verdict]:
    """Judge whether all that was to be tried was: sums of the engines' own counters."""
    disk, remote = engine["disk"], engine["remote"]
    ways = {
        "chunks read from disk": disk["gets"],
        "chunks read from the store": remote["gets"],
        "damaged chunks found on disk": disk["corrupt"],
        "damaged chunks found in the store": remote["corrupt"],
        "reads and writes of the disk that failed": disk["io_errors"],
        "calls of the store that failed": remote["io_errors"] + remote["unanswered"],
        "chunks copied between engines": transfer["received_chunks"],
        "copies between engines that broke off": transfer["moves_failed"],
        "evictions": engine["evictions"],
    }
    return [at_least_one(what, count) for what, count in ways.items()]


def of_troubles(brought: Mapping[Kind, int], damaged: Mapping[Kind, int]) -> list[Verdict]:
    """Judge whether each kind of trouble came about, and how many bits were flipped by whom."""
    never = [kind.value for kind in Kind if not brought.get(kind)]
    flipped = {Kind.DISK_BITS, Kind.STORE_BITS}
    return [
        Verdict(
            what="every kind of trouble came about",
            holds=not never,
            found=", ".join(f"never: {each}" for each in never) or f"{sum(brought.values())} times",
        ),
        *(at_least_one(f"{kind} somewhere", damaged.get(kind, 0)) for kind in sorted(flipped)),
    ]


def of_slots(left: Mapping[str, Mapping[str, Any] | None]) -> list[Verdict]:
    """Judge what the engines have left when all their requests had ended."""
    found = []
    for name, each in left.items():
        bad = "it said nothing of it" if each is None else _leaked(each)
        told = bad or f"a store got all {each['slots'] if each else 0} slots"
        found.append(Verdict(what=f"no slot or pin of {name} leaked", holds=not bad, found=told))
    return found


def _leaked(left: Mapping[str, Any]) -> str:
    missing = left["slots"] - left["reserved_slots"]
    bad = {
        f"{missing} slots neither free nor to be evicted": missing,
        f"{left['held_bytes']} bytes held": left["held_bytes"],
        f"{left['put_queue_bytes']} bytes still to be put": left["put_queue_bytes"],
        str(left["error"]): left["error"],
    }
    return "; ".join(what for what, is_so in bad.items() if is_so)


def of_locks(locks: Locks) -> list[Verdict]:
    """Judge the holds, by the clock and by what the holder computed."""
    count = locks.held.counts.total()
    longest = locks.by_call.get(locks.longest_call, LongHolds())
    return [
        at_least_one("holds of the engines' locks", count),
        _of_holds("by the clock", locks.held, f", by {locks.longest_call}"),
        _of_holds("of the holder's CPU time", locks.computed, ""),
        Verdict(
            what="calls that held a lock for more than a millisecond (told, not judged)",
            holds=True,
            found=f"{sum(each.count for each in locks.by_call.values())} of {count} holds; "
            f"the longest computed for {longest.cpu_ns / 1e6:.2f} ms of its time",
        ),
    ]


def _of_holds(of_what: str, durations: Durations, by: str) -> Verdict:
    p50, p99, p999 = (durations.quantile_ns(share) for share in (0.5, 0.99, HELD_SHARE))
    return Verdict(
        what=f"a hold takes less than 1 ms at p99.9, {of_what}",
        holds=durations.counts.total() > 0 and p999 < MOST_HELD_NS,
        found=f"p50 {p50 / 1e3:.1f} us, p99 {p99 / 1e3:.0f} us, p99.9 {p999 / 1e3:.0f} us, "
        f"longest {durations.longest_ns / 1e6:.2f} ms{by}",
    )


def of_memory(lives: Mapping[str, Sequence[Sample]], settling_s: float) -> list[Verdict]:
    """Judge memory and open files of the processes that lived long enough for it."""
    judged = {
        name: samples
        for name, samples in lives.items()
        if samples and samples[-1].at_s >= settling_s + min(_SETTLED_S, settling_s)
    }
    return [
        at_least_one("processes that lived long enough to judge their memory", len(judged)),
        *of_processes(judged, settling_s),
    ]


def of_ends(
    ended: Collection[str], failures: Sequence[str], bad_lines: Sequence[str]
) -> list[Verdict]:
    """Judge processes that ended by themselves, agents' answers 500, and what was logged."""
    return [
        _none("engines that ended by themselves", sorted(ended)),
        _none("answers 500 of an agent", failures),
        _none("tracebacks in the engines' logs", bad_lines),
    ]


def total(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of nested counters; what is no number is left out."""
    sums: dict[str, Any] = {}
    for each in told:
        for name, value in each.items():
            if isinstance(value, Mapping):
                sums[name] = total([sums.get(name, {}), value])
            elif isinstance(value, int | float):
                sums[name] = sums.get(name, 0) + value
    return sums


def _none(what: str, there: Sequence[str]) -> Verdict:
    return Verdict(what=f"no {what}", holds=not there, found="; ".join(there[:3]) or "none")
