"""The requests on which ours lost most to another contender, from the records. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.proof.kept.records import Columns
from bench.proof.report import cells

Kept = Mapping[str, Any]
"""What is kept of a request: `Columns.row`."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A request that ours served later; times in model seconds."""

    number: int
    lost_s: float
    ours: Kept
    theirs: Kept


def lost(ours: Columns, theirs: Columns) -> list[Lost]:
    """Return the requests that both answered, from the greatest loss to the greatest gain."""
    other = {each: at for at, each in enumerate(theirs.number)}
    found = [
        Lost(
            number=number,
            lost_s=(ours.ttft_ms[at] - theirs.ttft_ms[other[number]]) / 1000,
            ours=ours.row(at),
            theirs=theirs.row(other[number]),
        )
        for at, number in enumerate(ours.number)
        if number in other and ours.ttft_ms[at] >= 0 and theirs.ttft_ms[other[number]] >= 0
    ]
    return sorted(found, key=lambda each: each.lost_s, reverse=True)


def summary(requests: Sequence[Lost], count: int) -> str:
    """Return how much was lost and gained in all, and by which of the router's reasons."""
    behind = [each for each in requests if each.lost_s > 0]
    lost_s = sum(each.lost_s for each in behind)
    gained_s = sum(each.lost_s for each in requests) - lost_s
    first_s = sum(each.lost_s for each in behind[:count])
    by_reason: Counter[str] = Counter()
    for each in behind:
        by_reason[str(each.ours["reason"])] += round(each.lost_s)
    reasons = ", ".join(f"{reason} {seconds} s" for reason, seconds in by_reason.most_common())
    return (
        f"{len(behind)} of {len(requests)} requests were answered later, by {lost_s:.0f} s in all "
        f"(the first {count}: {first_s:.0f} s), the others sooner by {-gained_s:.0f} s\n"
        f"lost by reason: {reasons or '-'}"
    )


def costliest_table(requests: Sequence[Lost], other: str) -> str:
    """Return a line for each request: both decisions, with what was found where."""
    head = ["request", "turn", "due s", "tokens", "lost s", "ours: reason", "replica", "TTFT s"]
    head += ["predicted", "before", "gpu/cpu/disk", "computed", f"{other}: replica", "TTFT s"]
    head += ["gpu/cpu/disk", "computed"]
    return cells.plain(head, [_line(each) for each in requests])


def _line(each: Lost) -> list[str]:
    mine, other = each.ours, each.theirs
    return [
        str(each.number),
        str(mine["turn"]),
        f"{mine['due_s']:.1f}",
        str(mine["prompt_tokens"]),
        f"{each.lost_s:.2f}",
        str(mine["reason"] or "-"),
        str(mine["replica"]),
        _seconds(mine["ttft_ms"]),
        _seconds(mine["predicted_ms"]),
        _seconds(mine["before_ms"]),
        _tiers(mine),
        str(mine["computed"]),
        str(other["replica"]),
        _seconds(other["ttft_ms"]),
        _tiers(other),
        str(other["computed"]),
    ]


def _tiers(kept: Kept) -> str:
    return f"{kept['gpu']}/{kept['cpu']}/{kept['disk']}"


def _seconds(milliseconds: int | None) -> str:
    return "-" if milliseconds is None or milliseconds < 0 else f"{milliseconds / 1000:.2f}"
