"""A thread that always wants the interpreter's lock, and what it had to wait for.

It gives the lock away at every turn. What one of its turns takes, less the time for which the
kernel says that it had no core, and at most the time that the process's other threads computed
meanwhile, is how long the lock was held: without what other work on the machine took of the
holder's time.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

_TURN_S: Final = 0.0001


class Spinner:
    """A thread that always wants the lock, and notes how long it had to wait at most."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._is_fresh = threading.Event()
        self._longest_s = 0.0
        self._turns = 0
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget what was, and return when the thread spins."""
        self._is_fresh.clear()
        self._is_fresh.wait()

    def longest_s(self) -> float:
        """Return the longest wait since `begin`, that which has not ended yet among them."""
        turns = self._turns
        while self._turns == turns:
            time.sleep(_TURN_S)
        return self._longest_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def _spin(self) -> None:
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        before = Reading.now(schedstat)
        while not self._is_over.is_set():
            now = Reading.now(schedstat)
            if self._is_fresh.is_set():
                self._longest_s = max(self._longest_s, before.held_until_s(now))
            else:
                self._longest_s = 0.0
                self._is_fresh.set()
            self._turns += 1
            before = now
        os.close(schedstat)


@dataclass(frozen=True)
class Reading:
    """Clocks, as the spinning thread reads them at each of its turns."""

    at_s: float
    without_core_s: float
    others_computed_s: float
    """The process's other threads, since its start."""

    @classmethod
    def now(cls, schedstat: int) -> "Reading":
        """Read them, giving the lock away; ``schedstat`` is the thread's file of the kernel."""
        # A read of the kernel's file gives the lock away, as `sleep(0)` would.
        without_core_s = int(os.pread(schedstat, 64, 0).split()[1]) / 1e9
        return cls(time.monotonic(), without_core_s, time.process_time() - time.thread_time())

    def held_until_s(self, later: "Reading") -> float:
        """Return for how long another thread can have computed with the lock between the two."""
        waited_s = later.at_s - self.at_s - (later.without_core_s - self.without_core_s)
        return min(waited_s, later.others_computed_s - self.others_computed_s)


@contextmanager
def before_other_work() -> Iterator[None]:
    """Have this thread, and all that it starts, run before the machine's other work, if it may.

    Else a thread that has no core just then does not see a hold.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
