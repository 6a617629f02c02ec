"""Rounds: every contender started anew, every case sent to each of them in rotation."""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.overhead import prompts
from bench.overhead.case import WARM_UP, Case
from bench.overhead.contenders import CannotRunError, Contender, check_knows_tokens, start
from bench.overhead.figures import Sample
from bench.overhead.measure import Prepared, Watched, measure
from bench.ttft import BenchError
from router.launch.processes import ChildFailedError, ProcessGroup, tail

_REPLICAS: Final = "replicas"
_READY_S: Final = 60.0
_GRACE_S: Final = 5.0
_WARM_UP_AT_ONCE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What runs in a round beside the contenders."""

    group: ProcessGroup
    directory: Path
    """For logs and configurations."""
    replicas_pid: int
    silent: tuple[str, ...]
    """URLs of replicas that publish nothing."""
    telling: tuple[str, ...]
    """URLs of replicas that publish KV events; empty where no contender needs them."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One contender that runs."""

    urls: tuple[str, ...]
    """Where its requests are sent."""
    watched: Watched


@dataclass(kw_only=True)
class Results:
    """What has been measured so far, and what could not be."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    """By case, then by contender; one of each round."""
    why_not: dict[str, str] = field(default_factory=dict)
    """By contender: why it is not in the comparison."""

    def add(self, case: str, contender: str, one: Sample) -> None:
        """Keep a sample."""
        self.samples.setdefault(case, {}).setdefault(contender, []).append(one)


def run_round(
    number: int,
    contenders: Mapping[str, Contender],
    cases: Sequence[Case],
    prepared: Prepared,
    results: Results,
    *,
    connections: int,
) -> None:
    """Measure every case with every contender once; raise `BenchError`.

    A contender that cannot be started is left out, of the rounds that follow too.
    """
    with tempfile.TemporaryDirectory() as made, ProcessGroup(grace_s=_GRACE_S) as group:
        ground = _ground(group, Path(made), prepared)
        lanes: dict[str, Lane] = {}
        for name, contender in contenders.items():
            if name not in results.why_not:
                try:
                    lanes[name] = _start(contender, ground, prepared)
                except CannotRunError as error:
                    results.why_not[name] = str(error)
        for index, case in enumerate(cases):
            for name in rotated(list(lanes), number + index):
                taken = measure(
                    case,
                    prepared.bodies[case.name],
                    lanes[name].urls,
                    lanes[name].watched,
                    connections=connections,
                    number=number,
                )
                results.add(case.name, name, taken)
            print(f"round {number + 1}: {case.name}", file=sys.stderr)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return names in the same circle, beginning with another one."""
    at = by % len(names) if names else 0
    return [*names[at:], *names[:at]]


def _start(contender: Contender, ground: Ground, prepared: Prepared) -> Lane:
    """Start a contender and warm it up; raises `CannotRunError`."""
    replicas = ground.telling if contender.needs_events else ground.silent
    running = start(contender, ground.group, replicas, ground.directory)
    lane = Lane(
        urls=running.urls, watched=Watched(pid=running.pid, replicas_pid=ground.replicas_pid)
    )
    warm = measure(
        WARM_UP, prepared.warm_up, lane.urls, lane.watched, connections=_WARM_UP_AT_ONCE, number=-1
    )
    if warm.first_error is not None:
        raise CannotRunError(f"{warm.errors} of {WARM_UP.requests} failed: {warm.first_error}")
    if contender.needs_events:
        check_knows_tokens(running, prompts.read(prepared.warm_up)[-1][-1])
    return lane


def _ground(group: ProcessGroup, directory: Path, prepared: Prepared) -> Ground:
    """Start the fake replicas."""
    command = [sys.executable, "-m", "bench.overhead.fake"]
    if prepared.known is not None:
        command += ["--prompts", str(prepared.known), "--tokenizer", str(prepared.tokenizer)]
    log = directory / f"{_REPLICAS}.log"
    try:
        pid = group.start(_REPLICAS, command, None, log)
        told = _first_line(group, log)
    except ChildFailedError as error:
        raise BenchError(str(error)) from None
    return Ground(
        group=group,
        directory=directory,
        replicas_pid=pid,
        silent=tuple(each["url"] for each in told["silent"]),
        telling=tuple(each["url"] for each in told["telling"] or ()),
    )


def _first_line(group: ProcessGroup, log: Path) -> dict[str, Any]:
    """Return what the replicas say of themselves, as soon as they do."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        group.check()
        line = log.read_text(encoding="utf-8", errors="replace")
        if line.startswith("{") and line.endswith("\n"):
            told: dict[str, Any] = json.loads(line)
            return told
        time.sleep(0.05)
    raise BenchError(f"the replicas were not ready within {_READY_S:.0f} s:\n{tail(log)}")
