"""Memory, open files and CPU time of processes, over time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from bench.processes import process_cpu_s

_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One process at one time."""

    at_s: float
    """Since the soak began."""
    rss_bytes: int
    own_bytes: int
    """Of it what the process has allocated (anonymous). The rest are pages of program files, which
    the kernel drops when others want memory, and which come again one by one."""
    fds: int


@dataclass(kw_only=True)
class Watch:
    """Samples of processes, by their names."""

    began_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """At the last sample."""

    async def run(self, pids: Mapping[str, int]) -> None:
        """Take a sample of each now and then; without end."""
        while True:
            for name, pid in pids.items():
                self.samples.setdefault(name, []).append(self._sample(pid))
                self.cpu_s[name] = process_cpu_s(pid)
            await asyncio.sleep(_EVERY_S)

    def _sample(self, pid: int) -> Sample:
        proc = Path(f"/proc/{pid}")
        told = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return Sample(
            at_s=time.monotonic() - self.began_s,
            rss_bytes=_bytes(told["VmRSS"]),
            own_bytes=_bytes(told["RssAnon"]),
            fds=len([*(proc / "fd").iterdir()]),
        )


def _bytes(told: str) -> int:
    """Return a size of ``/proc/PID/status``, which is in kB."""
    return int(told.split(maxsplit=1)[0]) << 10


def growth(samples: Sequence[Sample]) -> float:
    """Return by what share of the first its own memory has grown, on a line fitted to all."""
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
