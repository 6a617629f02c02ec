"""What a process and all that it has started use, read from /proc (see proc(5))."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What one process's ``/proc/PID/stat`` tells of it."""

    pid: int
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
    """User and system, since they started; in steps of a clock tick, mostly 0.01 s."""
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
        session=int(fields[3]),
        own_ticks=int(fields[11]) + int(fields[12]),
        ended_ticks=int(fields[13]) + int(fields[14]),
        resident_pages=int(fields[21]),
    )


def session_usage(leader: int, proc: Path = PROC) -> Usage:
    """Return what a session's leader and all processes of its session have used.

    Of children that have ended, those of the leader count.
    """
    found = [each for each in _stats(proc) if each.session == leader]
    ticks = sum(each.own_ticks for each in found)
    ticks += sum(each.ended_ticks for each in found if each.pid == leader)
    pages = sum(each.resident_pages for each in found)
    return Usage(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        processes=len(found),
    )


def _stats(proc: Path) -> Iterator[Stat]:
    for path in proc.glob("[0-9]*/stat"):
        try:
            yield parse_stat(path.read_text())
        except OSError:
            continue  # it has ended meanwhile
