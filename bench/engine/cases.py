"""What `bench.engine` measures, case by case, compared with a limit measured at the same time."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.ttft import percentile

MIB: Final = 1024**2
SHARE_OF_LIMIT: Final = 0.9
_PAUSE_S: Final = 0.02

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing measured in several rounds, ``limit[i]`` right before or after ``ours[i]``."""

    name: str
    unit: str
    """'ms' (of all bytes together), 'us' (of one call) or 'B' (of one chunk)."""
    ours: list[float]
    limit: list[float]
    ours_cpu: list[float] = field(default_factory=list)
    """Processor time of the same rounds, all threads together: what a busy machine leaves alike."""
    limit_cpu: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    bar: float | None = None
    """The most that ours may be, in ``unit``; None: see the next two."""
    least_ratio: float = SHARE_OF_LIMIT
    """The least share of the limit's speed that is enough."""
    most_cpu: float | None = None
    """The most processor time, compared with the limit's; then that counts, and not the speed."""

    @property
    def ratio(self) -> float:
        """Our speed as a share of the limit's: the median over the rounds."""
        pairs = zip(self.limit, self.ours, strict=True)
        return statistics.median(limit / ours for limit, ours in pairs)

    @property
    def cpu_ratio(self) -> float:
        """Our processor time, compared with the limit's: the median over the rounds."""
        pairs = zip(self.ours_cpu, self.limit_cpu, strict=True)
        return statistics.median(ours / limit for ours, limit in pairs)

    @property
    def is_met(self) -> bool:
        """Whether the bar is reached, by the medians."""
        if self.bar is not None:
            return statistics.median(self.ours) <= self.bar
        if self.most_cpu is not None:
            return self.cpu_ratio <= self.most_cpu
        return self.ratio >= self.least_ratio

    @property
    def shown_bar(self) -> str:
        """What must be reached."""
        if self.bar is not None:
            return f"{self.bar:g} {self.unit}"
        if self.most_cpu is not None:
            return f"{self.most_cpu:g} x cpu"
        return f"{self.least_ratio:.0%}"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One side of a case: what is timed, and what is done right before and after it, untimed."""

    step: Step
    before: Step | None = None
    after: Step | None = None


def in_turns(
    name: str,
    rounds: int,
    ours: Contender,
    limit: Contender,
    *,
    moved_bytes: int,
    least_ratio: float = SHARE_OF_LIMIT,
    most_cpu: float | None = None,
) -> Case:
    """Time both in turns, who goes first changing each round; the first round is not counted."""
    case = Case(
        name=name,
        unit="ms",
        ours=[],
        limit=[],
        moved_bytes=moved_bytes,
        least_ratio=least_ratio,
        most_cpu=most_cpu,
    )
    turns = [(case.ours, case.ours_cpu, ours), (case.limit, case.limit_cpu, limit)]
    for number in range(rounds + 1):
        for times, cpu_times, contender in turns if number % 2 else turns[::-1]:
            took_s, cpu_s = _timed(contender)
            if number:
                times.append(took_s * 1e3)
                cpu_times.append(cpu_s * 1e3)
    return case


def _timed(contender: Contender) -> tuple[float, float]:
    """Return the seconds and the processor seconds of one turn."""
    if contender.before is not None:
        contender.before()
    # Threads of the turn before that still spin for work would share the cores.
    time.sleep(_PAUSE_S)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    contender.step()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if contender.after is not None:
        contender.after()
    return took_s, cpu_s


def size(size_bytes: int) -> str:
    """Spell a size out."""
    return f"{size_bytes / MIB:g} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:g} KiB"


def table(cases: Sequence[Case]) -> str:
    """Return medians and 90th percentiles of both sides, the ratio, and whether it is enough."""
    header = (
        f"{'':<60}{'ours p50':>10}{'p90':>9}{'cpu':>8}{'limit p50':>11}{'p90':>9}{'cpu':>8}   unit"
        f"{'GB/s':>8}{'limit':>7}{'ratio':>8}  bar"
    )
    return "\n".join([header, "-" * len(header), *map(_line, cases)])


def _line(case: Case) -> str:
    ours, limit = statistics.median(case.ours), statistics.median(case.limit)
    moved_mb = case.moved_bytes / 1e6
    speeds = [f"{moved_mb / value_ms:.2f}" if moved_mb else "" for value_ms in (ours, limit)]
    verdict = f"met ({case.shown_bar})" if case.is_met else f"MISSED ({case.shown_bar})"
    return (
        f"{case.name:<60}{ours:>10.1f}{percentile(case.ours, 0.9):>9.1f}{_cpu(case.ours_cpu)}"
        f"{limit:>11.1f}{percentile(case.limit, 0.9):>9.1f}{_cpu(case.limit_cpu)}{case.unit:>7}"
        f"{speeds[0]:>8}{speeds[1]:>7}{case.ratio:>8.2f}  {verdict}"
    )


def _cpu(values: Sequence[float]) -> str:
    return f"{statistics.median(values):>8.1f}" if values else " " * 8


def as_json(case: Case) -> dict[str, Any]:
    """Return every figure of a case."""
    return {
        "name": case.name,
        "unit": case.unit,
        "moved_bytes": case.moved_bytes,
        "ours": _figures(case.ours),
        "limit": _figures(case.limit),
        "ours_cpu_p50": statistics.median(case.ours_cpu) if case.ours_cpu else None,
        "limit_cpu_p50": statistics.median(case.limit_cpu) if case.limit_cpu else None,
        "ratio": case.ratio,
        "cpu_ratio": case.cpu_ratio if case.ours_cpu else None,
        "bar": case.shown_bar,
        "met": case.is_met,
    }


def _figures(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(values),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "samples": len(values),
    }
