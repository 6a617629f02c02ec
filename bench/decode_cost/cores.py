"""Which thread runs on which core."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from bench.processes import PROC, process_family

_OTHERS_FIRST: Final = 1
_MODEL_FIRST: Final = 2
"""Priorities above all work that has none."""


@contextmanager
def parted(model_pid: int) -> Iterator[None]:
    """Give the main thread of a process, which computes the model, a core of its own.

    All other threads of this process and of its descendants share the other cores for the length
    of the block. Where it may be (root), all of them go before the machine's other work,
    the model before all: so no thread that has the interpreter's lock loses its core to what has
    nothing to do with it. Threads that are started meanwhile are as the one that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    _place(_threads(os.getpid()), cores[1:], os.SCHED_RR, _OTHERS_FIRST)
    _place([model_pid], cores[:1], os.SCHED_FIFO, _MODEL_FIRST)
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
        with contextlib.suppress(FileNotFoundError):
            for thread in (PROC / str(each) / "task").iterdir():
                yield int(thread.name)
