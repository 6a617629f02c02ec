"""One fleet profiled in every way: through the router, and without it."""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.aiperf.client import ARTIFACTS, Workload, arguments, profile
from bench.aiperf.fleets import Fleet
from bench.aiperf.report import Figures, kept_texts, own_table, read_report
from bench.aiperf.stage import Stage

ROUTER: Final = "router"
"""The first run: the router is ended before the others."""
DIRECT: Final = {"in-turn": False, "one-replica": True}
"""Runs without the router: whether the first replica alone is asked."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one run of AIPerf."""

    told: Sequence[str]
    """Its own arguments."""
    version: str
    wall_s: float
    """Its start and end included."""
    figures: Figures
    kept: Mapping[str, str]
    """The texts of its report, by their endings."""
    table: str
    """Its own."""


def say(text: str) -> None:
    """Tell how far it is; the tables alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def measure(
    fleet: Fleet, workload: Workload, program: Path, logs: Path | None = None
) -> dict[str, Run]:
    """Start a fleet, profile it in every way, end all of it; raise what stood in the way.

    What its processes said is left in ``logs``.
    """
    with tempfile.TemporaryDirectory(prefix="warmroute-") as made:
        directory = Path(made)
        with _kept_logs(directory, logs), fleet.start(directory) as stage:
            router = [stage.start_router()]
            runs = {ROUTER: _profile(stage, workload, program, router, directory / ROUTER)}
            stage.group.stop(stage.router)
            urls = [each.url for each in stage.replicas]
            for name, is_alone in DIRECT.items():
                load = workload.share(len(urls)) if is_alone else workload
                asked = urls[:1] if is_alone else urls
                runs[name] = _profile(stage, load, program, asked, directory / name)
    return runs


@contextmanager
def _kept_logs(directory: Path, logs: Path | None) -> Iterator[None]:
    """Copy all logs of a directory at the end, however it comes."""
    try:
        yield
    finally:
        if logs:
            for path in directory.rglob("*.log"):
                copy = logs / path.relative_to(directory)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)


def _profile(
    stage: Stage, workload: Workload, program: Path, urls: Sequence[str], work: Path
) -> Run:
    say(f"{work.name}: on empty caches")
    stage.empty()
    work.mkdir()
    told = arguments(workload, model=stage.model, urls=urls)
    wall_s = profile(program, told, group=stage.group, tokenizer=stage.tokenizer, work=work)
    figures, version = read_report(work / ARTIFACTS)
    say(f"{work.name}: {figures.requests} answers in {wall_s:.0f} s, {figures.errors} errors")
    return Run(
        told=told,
        version=version,
        wall_s=wall_s,
        figures=figures,
        kept=kept_texts(work / ARTIFACTS, work),
        table=own_table(work / ARTIFACTS),
    )
