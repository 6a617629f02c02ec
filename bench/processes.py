"""What a process and all that it has started use, read from /proc (see proc(5))."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What ``/proc/PID/stat`` reports of one process."""

    pid: int
    parent: int
    session: int
    """Process id of its session's leader."""
    own_ticks: int
    """Clock ticks in user and kernel mode, of all its threads."""
    ended_ticks: int
    """The same of its children that have ended and were waited for."""
    resident_pages: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the processes of one session have used."""

    cpu_s: float
    """User and system, since they started."""
    resident_bytes: int
    """Memory in RAM now. Pages that several of them share count in each."""
    processes: int


def parse_stat(text: str) -> Stat:
    """Read the one line of a ``stat`` file; raise ValueError for anything else."""
    # A program's name stands in parentheses and may hold spaces and parentheses itself.
    begin, parenthesis, rest = text.rpartition(")")
    fields = rest.split()
    if not parenthesis or len(fields) < 22:
        raise ValueError(f"not a line of /proc/PID/stat: {text[:80]!r}")
    return Stat(
        pid=int(begin.partition(" ")[0]),
        parent=int(fields[1]),
        session=int(fields[3]),
        own_ticks=int(fields[11]) + int(fields[12]),
        ended_ticks=int(fields[13]) + int(fields[14]),
        resident_pages=int(fields[21]),
    )


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, to the nanosecond; OSError if it is gone.

    A ``stat`` file has them in steps of 0.01 s, in which a fast router answers
    a hundred requests.
    """
    # What clock_getcpuclockid(3) makes of a process id, which Python does not offer.
    return time.clock_gettime(~pid << 3 | 2)


def session_usage(
    leader: int, proc: Path = PROC, cpu_s: Callable[[int], float] = process_cpu_s
) -> Usage:
    """Return what a session's leader and all processes of its session have used.

    Of children that have ended, those of the leader count.
    """
    found = [each for each in _stats(proc) if each.session == leader]
    ended_ticks = sum(each.ended_ticks for each in found if each.pid == leader)
    pages = sum(each.resident_pages for each in found)
    return Usage(
        cpu_s=sum(_cpu_s(each, cpu_s) for each in found) + ended_ticks / _ticks_per_s(),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        processes=len(found),
    )


def _cpu_s(stat: Stat, exact: Callable[[int], float]) -> float:
    try:
        return exact(stat.pid)
    except OSError:
        return stat.own_ticks / _ticks_per_s()  # it has ended meanwhile


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _stats(proc: Path) -> Iterator[Stat]:
    for path in proc.glob("[0-9]*/stat"):
        try:
            yield parse_stat(path.read_text())
        except OSError:
            continue  # it has ended meanwhile
