"""All runs of a case, over a pool of processes.

The workloads and the driver (`Bench`) are called there, so both must be picklable.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Protocol

from bench.proof.case import Case
from bench.proof.driver import Bench
from bench.proof.run import Ran, Task, run
from bench.ttft import BenchError


class Finished(Protocol):
    """Keeps what has run until its case is complete."""

    def get(self, task: Task) -> Ran | None:
        """Return what became of a task, if it has run."""

    def put(self, task: Task, ran: Ran) -> None:
        """Keep it."""


Tell = Callable[[int, int, Ran], None]
"""Is told of each run as it ends: how many are done, of how many, and the run."""


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
