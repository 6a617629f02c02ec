"""What both soaks share: the schedule of faults, the watch over memory and files, the verdicts."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Generic, TypeVar

from bench.processes import process_cpu_s

HOST: Final = "127.0.0.1"
NO_TARGET: Final = -1
MOST_GROWTH: Final = 0.05
MOST_MORE_FDS: Final = 8
"""Clients come and go by chance; a file that is left open at each fault would be more."""
_LONGEST_SETTLING_S: Final = 300.0
_SAMPLE_EVERY_S: Final = 5.0
_SHOWN_EVERY_S: Final = 60.0
_BAD_WORDS: Final = ("Traceback", " ERROR ", "Task exception", "never retrieved")

K = TypeVar("K", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """A run of some minutes in which memory is watched."""

    minutes: float

    @property
    def duration_s(self) -> float:
        """How long requests are sent and faults injected."""
        return self.minutes * 60

    @property
    def settling_s(self) -> float:
        """How long memory may grow: tables, memos and buffers fill up to their bounds."""
        return min(_LONGEST_SETTLING_S, self.duration_s / 3)


# --- Faults ---


@dataclass(frozen=True, kw_only=True)
class Fault(Generic[K]):
    """One fault of one process."""

    at_s: float
    """Since the run began."""
    kind: K
    target: int
    """The number of the process, from 0; `NO_TARGET` if it does not hit one of them."""
    lasts_s: float
    """Without the time that a new process takes to start."""


def schedule(
    rng: random.Random,
    lasts_s: Mapping[K, tuple[float, float]],
    targets: Callable[[K], Sequence[int]],
    *,
    duration_s: float,
    every_s: float,
) -> Iterator[Fault[K]]:
    """Yield one fault every ``every_s``, each kind as often as the others.

    ``lasts_s`` has the shortest and the longest duration of each kind, ``targets`` returns
    the processes that a kind may hit. No fault begins before the first interval is over,
    or in the last one.
    """
    left: list[K] = []
    at_s = every_s
    while at_s + every_s <= duration_s:
        if not left:
            left = rng.sample(list(lasts_s), len(lasts_s))
        kind = left.pop()
        yield Fault(
            at_s=at_s,
            kind=kind,
            target=rng.choice(targets(kind)),
            lasts_s=rng.uniform(*lasts_s[kind]),
        )
        at_s += every_s


async def due(
    faults: Iterable[Fault[K]], began_s: float, say: Callable[[str], None]
) -> AsyncIterator[Fault[K]]:
    """Yield each fault at its time, or as soon as the fault before it is over."""
    for fault in faults:
        await asyncio.sleep(began_s + fault.at_s - time.monotonic())
        where = "" if fault.target == NO_TARGET else f" process {fault.target + 1},"
        say(f"{fault.at_s:6.0f} s: {fault.kind},{where} for {fault.lasts_s:.0f} s")
        yield fault


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def stop_repeatedly(pid: int, *, stopped_s: float, runs_s: float) -> None:
    """Stop a process and let it continue, alternately, until this is cancelled."""
    while True:
        with stopped(pid):
            await asyncio.sleep(stopped_s)
        await asyncio.sleep(runs_s)


# --- Memory and open files ---


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One process at one time."""

    at_s: float
    """Since the watch began."""
    rss_bytes: int
    own_bytes: int
    """Memory that the process has allocated (anonymous). The rest are pages of program files:
    the kernel drops them when others want memory, and they return one by one."""
    fds: int


@dataclass(kw_only=True)
class Watch:
    """Samples of processes, by name."""

    began_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """At the last sample."""

    async def run(self, pids: Mapping[str, int]) -> None:
        """Take a sample of each process every few seconds, until this is cancelled."""
        while True:
            for name, pid in pids.items():
                self.samples.setdefault(name, []).append(self._sample(pid))
                self.cpu_s[name] = process_cpu_s(pid)
            await asyncio.sleep(_SAMPLE_EVERY_S)

    def _sample(self, pid: int) -> Sample:
        proc = Path(f"/proc/{pid}")
        lines = (proc / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return Sample(
            at_s=time.monotonic() - self.began_s,
            rss_bytes=_bytes(status["VmRSS"]),
            own_bytes=_bytes(status["RssAnon"]),
            fds=len([*(proc / "fd").iterdir()]),
        )


def _bytes(size: str) -> int:
    """Return a size of ``/proc/PID/status``, which is in kB."""
    return int(size.split(maxsplit=1)[0]) << 10


def growth(samples: Sequence[Sample]) -> float:
    """Return by what share of the first the own memory has grown, on a line fitted to all."""
    if len(samples) < 2:
        return 0.0
    mean_s = fmean(each.at_s for each in samples)
    mean_bytes = fmean(each.own_bytes for each in samples)
    spread = sum((each.at_s - mean_s) ** 2 for each in samples)
    slope = sum((e.at_s - mean_s) * (e.own_bytes - mean_bytes) for e in samples) / spread
    first = mean_bytes + slope * (samples[0].at_s - mean_s)
    return slope * (samples[-1].at_s - samples[0].at_s) / first


def more_fds(samples: Sequence[Sample]) -> float:
    """Return how many more files are open in the last quarter than in the first, as medians."""
    quarter = max(1, len(samples) // 4)
    first, last = samples[:quarter], samples[-quarter:]
    return median(each.fds for each in last) - median(each.fds for each in first)


# --- Verdicts ---


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS':<6} {self.what}: {self.found}"


def at_least_one(what: str, count: int) -> Verdict:
    """Return whether something happened at all: otherwise the run has shown nothing."""
    return Verdict(what=what, holds=count > 0, found=str(count))


def none_of(what: str, found: Sequence[str]) -> Verdict:
    """Return the verdict that a list of bad things is empty."""
    return Verdict(what=what, holds=not found, found="; ".join(found[:3]) or "none")


def of_processes(samples: Mapping[str, Sequence[Sample]], settling_s: float) -> list[Verdict]:
    """Return the verdicts on memory and open files, from when tables have filled."""
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


def bad_lines(logs: Iterable[Path], *, allowed: str | None = None) -> list[str]:
    """Return the lines of logs that report an error, but those with the ``allowed`` text."""
    return [
        f"{log.name}: {line}"
        for log in logs
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in _BAD_WORDS) and (allowed is None or allowed not in line)
    ]


# --- Reports ---


@dataclass(kw_only=True)
class Result:
    """The result of a soak."""

    verdicts: list[Verdict]
    report: dict[str, Any]
    """All figures, ready for JSON."""
    lines: list[str]
    """The figures that are printed after the verdicts."""

    @property
    def holds(self) -> bool:
        """Whether every verdict holds."""
        return all(each.holds for each in self.verdicts)

    def table(self) -> str:
        """Return the verdicts and the printed figures."""
        return "\n".join([*map(str, self.verdicts), *self.lines])

    def as_json(self) -> dict[str, Any]:
        """Return the verdicts and all figures, ready for JSON."""
        verdicts = [
            {"what": each.what, "holds": each.holds, "found": each.found} for each in self.verdicts
        ]
        return {"holds": self.holds, "verdicts": verdicts, **self.report}


def samples_json(samples: Iterable[Sample]) -> list[dict[str, float]]:
    """Return one sample for each minute, ready for JSON."""
    shown, due_s = [], 0.0
    for each in samples:
        if each.at_s >= due_s:
            shown.append(
                {
                    "minute": round(each.at_s / 60, 1),
                    "rss_mib": round(each.rss_bytes / 2**20, 1),
                    "own_mib": round(each.own_bytes / 2**20, 1),
                    "fds": each.fds,
                }
            )
            due_s += _SHOWN_EVERY_S
    return shown
