"""The engine's lock: decisions are made under it, and the work they leave is done without it."""

import contextlib
import logging
import threading
from collections.abc import Callable

from cacheengine.residency.decider import Decider
from cacheengine.residency.decisions import PendingWork

logger = logging.getLogger("vllm.warmroute")


class EngineLock:
    """Lends the state that all decisions share to one thread at a time: ``with lock as decider``.

    After each loan it starts the work that was decided, without the lock. Calls that take longer
    with more chunks take several loans, since the scheduler waits for each, whichever thread has
    it. Not reentrant.
    """

    def __init__(self) -> None:
        # Every change of the state, and every look at more than one part of it.
        self.lock = threading.Lock()
        self.listeners = EventListeners()

    def begin(self, decider: Decider, start: Callable[[PendingWork], None]) -> None:
        """Set the state that is lent, and what starts the I/O; once, before any loan."""
        self.decider = decider
        self._start = start

    def __enter__(self) -> Decider:
        self.lock.acquire()
        return self.decider

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the next loan takes the work along.
        work = self.decider.state.take_work() if kind is None else None
        self.lock.release()
        if work is None:
            return
        self._start(work)
        for promotion, outcome, chunks in work.settled:
            promotion.settle(outcome, chunks)
        if work.has_events:
            self.listeners.call()


class EventListeners:
    """Functions called after each change of what tiers hold; thread-safe. They must be quick."""

    def __init__(self) -> None:
        # Guards the list: one thread calls while another adds or removes.
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` from now on; return a function that ends that."""
        with self._lock:
            self._listeners.append(listener)

        def remove() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    def call(self) -> None:
        """Call all listeners, whatever each raises."""
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener()
            except Exception:  # the caller may be an I/O thread that has work to finish
                logger.exception("a listener to the cache engine's events failed")
