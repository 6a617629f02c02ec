"""Marked parts of a text, rewritten from the results.

``<!-- proof:NAME -->`` and ``<!-- /proof:NAME -->`` stand on lines of their own; what is
between them is the table of that name (`tables.names`), or a plot (`tables.PLOTS`).
"""

import re
from collections.abc import Callable
from typing import Final

from bench.proof.kept.tree import RESULTS
from bench.proof.report.tables import PLOTS, Results, table
from bench.ttft import BenchError

PAGES: Final = ("README.md", "docs/benchmarks.md", f"{RESULTS}/README.md")
"""The texts with marked parts, from the project's root."""
PLOT_PREFIX: Final = "plot-"
"""Of the names of marks whose part is a picture."""
_MARK: Final = re.compile(r"^<!-- (/?)proof:([\w-]+) -->$", re.MULTILINE)
_ALT: Final = {
    "goodput": "share of requests whose first token is in time, over load",
    "ttft": "share of requests answered within a time, at 80% load",
}


def rewritten(text: str, part: Callable[[str], str]) -> str:
    """Return a text with each marked part replaced by ``part`` of its name.

    Raises `BenchError` where a mark has no partner.
    """
    made, at = [], 0
    marks = list(_MARK.finditer(text))
    for opening, closing in zip(marks[::2], marks[1::2], strict=False):
        if (opening[1], closing[1]) != ("", "/") or opening[2] != closing[2]:
            raise BenchError(f"{_line(text, opening)} and {_line(text, closing)} are no pair")
        made += [text[at : opening.end()], "\n\n", part(opening[2]).strip(), "\n\n"]
        at = closing.start()
    if len(marks) % 2:
        raise BenchError(f"{_line(text, marks[-1])} has no partner")
    return "".join([*made, text[at:]])


def names(text: str) -> list[str]:
    """Return the names of the parts that are marked."""
    return [each[2] for each in _MARK.finditer(text) if not each[1]]


def part_from(results: Results, directory: str) -> Callable[[str], str]:
    """Return what makes the parts; ``directory`` is where plots lie, as the text names it."""

    def part(name: str) -> str:
        plot = name.removeprefix(PLOT_PREFIX)
        if name.startswith(PLOT_PREFIX) and plot in PLOTS:
            return f"![{_ALT[plot]}]({directory}/{PLOTS[plot]})"
        return table(name, results)

    return part


def _line(text: str, mark: re.Match[str]) -> str:
    return f"line {text.count(chr(10), 0, mark.start()) + 1} ({mark[0]})"
