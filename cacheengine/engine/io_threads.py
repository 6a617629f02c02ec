"""Threads that do the engine's blocking I/O."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("vllm.warmroute")


class JobRunner(Protocol):
    """Whatever runs the engine's I/O jobs; see `IoThreads` for what the calls mean."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job."""

    def stop(self) -> None:
        """Take no more jobs."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after `stop`."""


class IoThreads:
    """``count`` threads that run jobs in the order given, until `stop`.

    Daemons: a read that hangs in the kernel must not keep a process from
    exiting. The queue itself has no bound; its callers keep one.
    """

    def __init__(self, name: str, count: int) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; it should handle its own failures. False, queueing nothing, after `stop`."""
        # A job behind the marks of `stop` would never run: hence the lock.
        with self._lock:
            if not self._stopped:
                self._jobs.put(job)
            return not self._stopped

    def stop(self) -> None:
        """Take no more jobs; the threads end when those queued are done. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after `stop`; False if some still run then."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a thread less would be a slow death of the tier
                logger.exception("a job of the cache engine's I/O threads failed")
