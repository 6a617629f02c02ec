"""Runs in a pool of processes, and cases made into result files from a clean commit."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final, Protocol

from bench.proof.case import Case
from bench.proof.cases import TRACED
from bench.proof.records import packed
from bench.proof.results import Definition, FinishedRuns, Result, Store, Trace, kept_columns, result
from bench.proof.run import Bench, Ran, Task, run
from bench.proof.tree import Tree
from bench.ttft import BenchError, machine


class Finished(Protocol):
    """Keeps what has run until its case is complete."""

    def get(self, task: Task) -> Ran | None:
        """Return what became of a task, if it has run."""

    def put(self, task: Task, ran: Ran) -> None:
        """Keep it."""


Tell = Callable[[int, int, Ran], None]
"""Called when a run ends, with the number done, the total, and the run."""


def tasks(case: Case) -> list[Task]:
    """Return a case's runs, seed by seed."""
    return [
        Task(case=case, seed=seed, contender=contender)
        for seed in case.seeds
        for contender in case.contenders
    ]


def run_case(case: Case, bench: Bench, *, jobs: int, finished: Finished, tell: Tell) -> list[Ran]:
    """Run what has not run yet; return all runs in the order of `tasks`.

    Raises `BenchError` at the first run that fails; what has run is kept in ``finished``.
    """
    wanted = tasks(case)
    done = {at: ran for at, task in enumerate(wanted) if (ran := finished.get(task)) is not None}
    left = {at: task for at, task in enumerate(wanted) if at not in done}
    for at, ran in _run_all(left, bench, jobs):
        finished.put(wanted[at], ran)
        done[at] = ran
        tell(len(done), len(wanted), ran)
    return [done[at] for at in range(len(wanted))]


def _run_all(left: Mapping[int, Task], bench: Bench, jobs: int) -> Iterator[tuple[int, Ran]]:
    """Yield runs as they end."""
    if jobs == 1:
        for at, task in left.items():
            yield at, run(task, bench)
        return
    # Spawned, not forked: a run begins with nothing but its arguments.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, task, bench): at for at, task in left.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], _result(future, left[futures[future]])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(future: Future[Ran], task: Task) -> Ran:
    try:
        return future.result()
    except BrokenProcessPool:
        raise BenchError(
            f"{task.case.name}: a process died, maybe for want of memory: "
            "run again with fewer --jobs"
        ) from None


UNFINISHED: Final = Path(".warmroute/proof")
"""Where runs are kept until their case is complete; from the root, ignored by git."""


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Inputs of all cases."""

    tree: Tree
    store: Store
    bench: Bench
    jobs: int
    say: Callable[[str], None]

    def make(self, cases: Sequence[Case]) -> list[str]:
        """Make what is missing; return what went wrong, a line for each case that failed.

        Raises `BenchError` where nothing can be made: a tree that is not clean, a trace
        that is not given.
        """
        self.tree.require_clean()
        require_traces(cases, self.bench.traces)
        wanted = definitions(cases, self.tree.sources(), self.bench.traces)
        left = [each for each in wanted if not self._is_made(each)]
        self.say(f"{len(wanted) - len(left)} cases are made, {len(left)} to make")
        failures = []
        for at, each in enumerate(left, 1):
            self.say(f"== {each.case.name} ({at} of {len(left)})")
            try:
                self._make(each)
            except BenchError as error:
                failures.append(str(error))
                self.say(f"FAILED: {error}")
        return failures

    def _is_made(self, definition: Definition) -> bool:
        try:
            return self.store.has(definition)
        except BenchError as error:
            self.say(f"{error}; it is made again")
            return False

    def _make(self, definition: Definition) -> None:
        commit = self._commit_of(definition)
        unfinished = FinishedRuns(self.tree.root / UNFINISHED / definition.digest)
        rans = run_case(
            definition.case,
            self.bench,
            jobs=self.jobs,
            finished=unfinished,
            tell=teller(self.say),
        )
        # What ran may have been edited while it did.
        self._commit_of(definition)
        case = definition.case
        records = packed(kept) if (kept := kept_columns(case, rans)) else b""
        made = result(definition, rans, machine=machine() | {"commit": commit}, records=records)
        self.say(f"written to {self.store.write(made, records)}")
        unfinished.remove()

    def _commit_of(self, definition: Definition) -> str:
        """Return the commit; raise `BenchError` where its sources are not the definition's."""
        self.tree.require_clean()
        if self.tree.sources() != definition.sources:
            raise BenchError(
                f"{self.tree.root} was given another commit while results were made: run again"
            )
        return self.tree.commit()


def definitions(
    cases: Sequence[Case], sources: str, traces: Mapping[str, Path]
) -> list[Definition]:
    """Return the cases with all that their results follow from."""
    known = {workload: trace(path) for workload, path in traces.items()}
    return [
        Definition(
            case=case,
            sources=sources,
            traces={case.workload: known[case.workload]} if case.workload in known else {},
        )
        for case in cases
    ]


def trace(path: Path) -> Trace:
    """Return a file's name and digest; raise `BenchError` where it cannot be read."""
    try:
        return Trace(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    except OSError as error:
        raise BenchError(f"the trace {path}: {error.strerror}") from None


def require_traces(cases: Sequence[Case], traces: Mapping[str, Path]) -> None:
    """Raise `BenchError` where a case needs a trace that is not given."""
    needed = {each.workload for each in cases if each.workload in TRACED} - {*traces}
    if needed:
        options = " ".join(f"--{each} FILE" for each in sorted(needed))
        raise BenchError(
            f"the published cases of {' and '.join(sorted(needed))} are on traces: give {options}, "
            "or choose others with --only"
        )


def teller(say: Callable[[str], None]) -> Tell:
    """Return a reporter of a case's runs as they end, and of the time left."""
    began_s, done_before = time.monotonic(), -1

    def tell(done: int, all_: int, ran: Ran) -> None:
        nonlocal done_before
        if done_before < 0:
            done_before = done - 1
        left_s = (time.monotonic() - began_s) / (done - done_before) * (all_ - done)
        figures = ran.plays[-1].figures
        p90 = "infinite" if figures.ttft_p90_s is None else f"{figures.ttft_p90_s:.2f} s"
        at = f" at {ran.plays[-1].workload.label:.2f}" if len(ran.plays) > 1 else ""
        say(
            f"{done:>4} of {all_}: {ran.contender}, seed {ran.seed}: p90{at} {p90}, "
            f"{figures.errors} failed ({ran.took_s:.0f} s; about {left_s / 60:.0f} min left)"
        )

    return tell


class NothingFinished:
    """Keeps no runs: for a case that is tried."""

    def get(self, task: Task) -> Ran | None:
        """Return None."""

    def put(self, task: Task, ran: Ran) -> None:
        """Do nothing."""


def tried(definition: Definition, bench: Bench, *, jobs: int, say: Callable[[str], None]) -> Result:
    """Run a case and return its result, of which nothing is kept."""
    rans = run_case(definition.case, bench, jobs=jobs, finished=NothingFinished(), tell=teller(say))
    return result(definition, rans, machine=machine(), records=b"")
