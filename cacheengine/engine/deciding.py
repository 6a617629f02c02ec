"""The engine's lock: decisions are taken under it, and followed up without it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from cacheengine.engine.listeners import Listeners
from cacheengine.residency import Decider, Todo


class Deciding:
    """Lends the state that all decisions share to one thread at a time: ``with deciding() as ...``.

    What takes longer with more chunks is done in several loans (`LongCalls`), since the
    scheduler waits for each, whichever thread has it.
    """

    def __init__(self) -> None:
        # Every change of the state, and every look at more than one part of it.
        self.lock = threading.Lock()
        self.listeners = Listeners()

    def begin(self, decider: Decider, start: Callable[[Todo], None]) -> None:
        """Say what is lent, and what does the I/O that was decided; once, before any loan."""
        self.decider = decider
        self._start = start

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Decider]:
        """Lend the state under the lock, then do what was decided, without it."""
        with self.lock:
            yield self.decider
            todo = self.decider.take_todo()
        if todo is None:
            return
        self._start(todo)
        for promotion, outcome, chunks in todo.settled:
            promotion.settle(outcome, chunks)
        if todo.has_news:
            self.listeners.tell()
