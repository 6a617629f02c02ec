"""Which thread runs on which core."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


@contextmanager
def parted(model_pid: int) -> Iterator[None]:
    """Give the main thread of a process, which computes the model, a core of its own.

    All other threads of this process and of those that it has started share the other cores for
    the length of the block. Others' processes go where they like. Threads and processes that are
    started meanwhile stay where the one is that starts them, as long as the block.
    """
    cores = sorted(os.sched_getaffinity(0))
    _bind(_family(os.getpid()), cores[1:])
    os.sched_setaffinity(model_pid, cores[:1])
    try:
        yield
    finally:
        _bind(_family(os.getpid()), cores)


def _bind(pids: Iterable[int], cores: Iterable[int]) -> None:
    allowed = set(cores)
    for pid in pids:
        # It, or a thread of it, may just have ended.
        with contextlib.suppress(FileNotFoundError):
            for thread in (_PROC / str(pid) / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), allowed)


def _family(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name before it, in brackets, may have blanks and brackets of its own.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found
