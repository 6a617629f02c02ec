"""Numbers as text in tables. Pure."""

import math
from collections.abc import Sequence
from typing import Final

from bench.proof.report.compare import Told
from bench.proof.statistics import Estimate

INFINITE: Final = "∞"
_SIGNS: Final = {"": "", "at least": "≥ ", "at most": "≤ ", "about": "~ "}


def number(value: float) -> str:
    """Return three digits of a number, as far as they are behind the point."""
    if not math.isfinite(value):
        return INFINITE
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def interval(estimate: Estimate | None, *, none: str = INFINITE) -> str:
    """Return a value with its interval in parentheses, where several seeds give one."""
    if estimate is None:
        return none
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)}-{number(estimate.high)})"


def told(each: Told | None) -> str:
    """Return such a value with the side that the truth lies on."""
    return INFINITE if each is None else _SIGNS[each.beyond] + interval(each.estimate)


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}%"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table: the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plain(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal, columns as wide as they need to be."""
    everything = [head, *lines]
    widths = [max(len(row[at]) for row in everything) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    )
