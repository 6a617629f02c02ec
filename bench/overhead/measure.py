"""One sample: a case sent to one contender by the load generator, while its use is watched."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.overhead import prompts
from bench.overhead.case import WARM_UP, Case
from bench.overhead.fake.telling import known_prompts, write_prompts
from bench.overhead.figures import Sample, Used, sample
from bench.overhead.load.talk import GO, Line, Outcome, Plan
from bench.processes import Usage, session_usage
from bench.ttft import BenchError

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
    )
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
    )
    return sample(number, outcome, used)


@contextmanager
def _generator(plan: Plan) -> Iterator[Callable[[Callable[[int], None]], Outcome]]:
    """Start a load generator; yield what lets it begin and returns its outcome.

    That is given what is to be called when all requests with a time are sent,
    with how many of them are under way.
    """
    command = [sys.executable, "-m", "bench.overhead.load"]
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
