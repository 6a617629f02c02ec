"""Which thread runs on which core."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from bench.processes import PROC, process_family

_OTHERS: Final = 1
_ENGINE: Final = 2
_MODEL: Final = 3
"""Priorities above all work that has none, the least first."""


@contextmanager
def parted(model_pid: int) -> Iterator[None]:
    """Give the main thread of a process, which computes the model, a core of its own.

    All other threads of this process and of its descendants share the other cores for the length
    of the block. Where it may be (root), all of them go before the machine's other work, the
    model before all, and the other threads of its process, the engine's among them, before the
    rest: so no thread that has the interpreter's lock, or is given it, waits for a core that
    another process has. That is what free cores would give it. Threads that are started meanwhile
    are as the one that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    # First: what computes all the time must not go before this thread on this thread's core.
    _place([model_pid], cores[:1], os.SCHED_FIFO, _MODEL)
    engine = {*_own_threads(model_pid)} - {model_pid}
    _place({*_threads(os.getpid())} - {model_pid} - engine, cores[1:], os.SCHED_RR, _OTHERS)
    _place(engine, cores[1:], os.SCHED_RR, _ENGINE)
    try:
        yield
    finally:
        _place(_threads(os.getpid()), cores, os.SCHED_OTHER, 0)


def _place(threads: Iterable[int], cores: Iterable[int], policy: int, priority: int) -> None:
    allowed, how = set(cores), os.sched_param(priority)
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, allowed)
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(thread, policy, how)


def _threads(pid: int) -> Iterator[int]:
    """Yield all threads of a process and of its descendants."""
    for each in process_family(pid):
        yield from _own_threads(each)


def _own_threads(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        for thread in (PROC / str(pid) / "task").iterdir():
            yield int(thread.name)
