"""The table for the terminal, and the report's figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.overhead.cases import Case
from bench.overhead.contenders import BARE_PROXY, DIRECT
from bench.overhead.figures import Figures, Sample, Spread, figures
from bench.overhead.rounds import Results

_COLUMNS: Final = (
    ("CPU ms/req", "cpu_ms", 2),
    ("x proxy", "cpu_to_proxy", 2),
    ("placing ms", "place_ms", 2),
    ("req/s", "requests_per_s", 0),
    ("first p50", "first_p50_ms", 2),
    ("p99", "first_p99_ms", 1),
    ("whole p50", "whole_p50_ms", 2),
    ("p99", "whole_p99_ms", 1),
    ("KiB/stream", "stream_kib", 0),
    ("load CPU", "load_cpu_share", 2),
)
_WITH_SPREAD: Final = frozenset({"cpu_ms", "requests_per_s"})
"""Shown with the lowest and the highest round; the report has these of every figure."""
_ADDED: Final = frozenset({"first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms"})
_NAME_WIDTH: Final = 20
_WIDTH: Final = 11
_SPREAD_WIDTH: Final = 22


def case_figures(results: Results, case: Case, names: Sequence[str]) -> list[Figures]:
    """Return what a case's samples say, in the order of the names."""
    samples = results.samples.get(case.name, {})
    direct, proxy = samples.get(DIRECT, ()), samples.get(BARE_PROXY, ())
    return [
        figures(name, samples[name], direct=() if name == DIRECT else direct, proxy=proxy)
        for name in names
        if name in samples
    ]


def table(case: Case, rows: Sequence[Figures]) -> str:
    """Return a case's table: medians over the rounds, latencies in ms and added to `DIRECT`'s."""
    head = "".join(f"{name:>{_width(key)}}" for name, key, _ in _COLUMNS)
    lines = [f"{case.name:<{_NAME_WIDTH}}{head}"]
    has_direct = any(each.contender == DIRECT for each in rows)
    for each in rows:
        sign = "+" if has_direct and each.contender != DIRECT else ""
        cells = "".join(
            f"{_cell(getattr(each, key), key, digits, sign):>{_width(key)}}"
            for _, key, digits in _COLUMNS
        )
        failed = f"  {each.errors} errors: {each.first_error}" if each.errors else ""
        lines.append(f"{each.contender:<{_NAME_WIDTH}}{cells}{failed}")
    return "\n".join(lines)


def _width(key: str) -> int:
    return _SPREAD_WIDTH if key in _WITH_SPREAD else _WIDTH


def _cell(spread: Spread | None, key: str, digits: int, sign: str) -> str:
    if spread is None:
        return "-"
    sign = sign if key in _ADDED else ""
    shown = f"{spread.median:{sign}.{digits}f}"
    if key in _WITH_SPREAD and spread.low < spread.high:
        shown += f" ({spread.low:.{digits}f}..{spread.high:.{digits}f})"
    return shown


def as_json(results: Results, cases: Sequence[Case], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return every case with its figures and the samples that they are made of."""
    return [
        {
            "case": case.name,
            **asdict(case),
            "contenders": [
                asdict(each) | {"samples": _samples(results.samples[case.name][each.contender])}
                for each in case_figures(results, case, names)
            ],
        }
        for case in cases
        if case.name in results.samples
    ]


def _samples(taken: Sequence[Sample]) -> list[Mapping[str, Any]]:
    return [asdict(each) for each in taken]
