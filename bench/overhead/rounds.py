"""Rounds: every contender is started again, and every case sent to each of them in rotation."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.overhead import cases as prompts
from bench.overhead.cases import WARM_UP, Case
from bench.overhead.contenders import (
    CannotRunError,
    Contender,
    check_knows_tokens,
    fill,
    metric,
    start,
)
from bench.overhead.fake_replicas import known_prompts, write_prompts
from bench.overhead.figures import Sample, Used, sample
from bench.overhead.load_generator import GO, Line, Outcome, Plan
from bench.processes import Usage, session_usage
from bench.ttft import BenchError
from router.launch.processes import ChildFailedError, ProcessGroup, tail

_OK: Final = 200
_REFUSED: Final = 429
_SETTLE_S: Final = 0.2
"""After the last answer a contender is still busy: with its books, and with KV events."""
_LEAST_OPEN: Final = 0.5
"""Share of a case's streams that must be open at once for their memory to be told."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is ready on disk before anything is measured."""

    tokenizer: Path
    warm_up: Path
    """Bodies, as those of the cases."""
    bodies: dict[str, Path]
    """By a case's name."""
    known: Path | None
    """What telling replicas know; None where there are none."""


def prepare(
    directory: Path, cases: Sequence[Case], tokenizer: Path, *, telling: bool, seed: int
) -> Prepared:
    """Write all prompts, and where there are telling replicas their tokens and keys."""
    lines = prompts.library_lines()
    every: list[bytes] = []

    def write(name: str, case: Case) -> Path:
        made = prompts.sequences(case, lines, random.Random(f"{seed} {name}"))
        every.extend(body for sequence in made for body in sequence)
        prompts.write(path := directory / f"{name}.jsonl", made)
        return path

    prepared = Prepared(
        tokenizer=tokenizer,
        warm_up=write("warm-up", WARM_UP),
        bodies={each.name: write(each.name, each) for each in cases},
        known=directory / "known.msgpack" if telling else None,
    )
    if prepared.known is not None:
        write_prompts(prepared.known, known_prompts(every, tokenizer))
    return prepared


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The processes that a sample is about."""

    pid: int | None
    """The contender's; None for one that has none."""
    replicas_pid: int
    status: int = 200
    """The status of all its answers."""
    metrics_url: str | None = None
    """URL of metrics that say how long placing took; None for a router without them."""

    def placed(self) -> tuple[float, float]:
        """Return how many requests were placed, and how long that took in all, in seconds."""
        if self.metrics_url is None:
            return 0.0, 0.0
        count, seconds = (
            metric(self.metrics_url, f"place_seconds_{each}") for each in ("count", "sum")
        )
        return count, seconds

    def use(self) -> Usage | None:
        """Return what the contender has used."""
        return None if self.pid is None else session_usage(self.pid)


def measure(
    case: Case,
    bodies: Path,
    urls: tuple[str, ...],
    watched: Watched,
    *,
    connections: int,
    number: int,
) -> Sample:
    """Send a case in a round; raise `BenchError` when the load generator cannot."""
    plan = Plan(
        urls=urls,
        bodies=str(bodies),
        answer=case.answer,
        tokens=case.tokens,
        rate_per_s=case.rate_per_s,
        connections=connections,
        status=watched.status,
    )
    placed_before = watched.placed()
    stream_bytes: float | None = None
    with _generator(plan) as begin:
        before, replicas_before = watched.use(), session_usage(watched.replicas_pid)

        def note_open(streams: int) -> None:
            nonlocal stream_bytes
            during = watched.use()
            if before is None or during is None or not case.holds_streams:
                return
            if streams >= _LEAST_OPEN * case.requests:
                stream_bytes = (during.resident_bytes - before.resident_bytes) / streams

        outcome = begin(note_open)
        time.sleep(_SETTLE_S)
        after, replicas_after = watched.use(), session_usage(watched.replicas_pid)
    used = Used(
        cpu_s=None if before is None or after is None else after.cpu_s - before.cpu_s,
        stream_bytes=stream_bytes,
        replicas_cpu_s=replicas_after.cpu_s - replicas_before.cpu_s,
        place_s=_mean_s(placed_before, watched.placed()),
    )
    return sample(number, outcome, used)


def _mean_s(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    count, seconds = (late - early for early, late in zip(before, after, strict=True))
    return seconds / count if count else None


@contextmanager
def _generator(plan: Plan) -> Iterator[Callable[[Callable[[int], None]], Outcome]]:
    """Start a load generator; yield what lets it begin and returns its outcome.

    It gets a function to call when all timed requests are sent,
    with how many of them are under way.
    """
    command = [sys.executable, "-m", "bench.overhead.load_generator"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            _tell(process, msgspec.json.encode(plan).decode() + "\n")
            if not _next(process).ready:
                raise BenchError("the load generator did not get ready")

            def begin(note_open: Callable[[int], None]) -> Outcome:
                _tell(process, GO)
                while True:
                    line = _next(process)
                    if line.open is not None:
                        note_open(line.open)
                    if line.done is not None:
                        return line.done

            yield begin
        except BaseException:
            process.kill()
            raise


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)


def _next(process: "subprocess.Popen[str]") -> Line:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("the load generator has ended early: see its words above")
    return msgspec.json.decode(line, type=Line)


_REPLICAS: Final = "replicas"
_READY_S: Final = 60.0
_GRACE_S: Final = 5.0
_WARM_UP_AT_ONCE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What else runs in a round, next to the contenders."""

    group: ProcessGroup
    open_until: ExitStack
    """For connections that are open until the round's end."""
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
    with (
        tempfile.TemporaryDirectory() as made,
        ProcessGroup(grace_s=_GRACE_S) as group,
        ExitStack() as open_until,
    ):
        ground = _ground(group, open_until, Path(made), prepared)
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
        urls=running.urls,
        watched=Watched(
            pid=running.pid,
            replicas_pid=ground.replicas_pid,
            status=_REFUSED if contender.refuses else _OK,
            metrics_url=running.urls[0] if contender.counts_placings else None,
        ),
    )
    if contender.refuses:
        fill(running, len(replicas), ground.open_until)
    warm = measure(
        WARM_UP, prepared.warm_up, lane.urls, lane.watched, connections=_WARM_UP_AT_ONCE, number=-1
    )
    if warm.first_error is not None:
        raise CannotRunError(f"{warm.errors} of {WARM_UP.requests} failed: {warm.first_error}")
    if contender.needs_events:
        check_knows_tokens(running, prompts.read(prepared.warm_up)[-1][-1])
    return lane


def _ground(
    group: ProcessGroup, open_until: ExitStack, directory: Path, prepared: Prepared
) -> Ground:
    """Start the fake replicas."""
    command = [sys.executable, "-m", "bench.overhead.fake_replicas"]
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
        open_until=open_until,
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
