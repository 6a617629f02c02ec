"""What is called when the engine's tiers have gained or lost chunks."""

import contextlib
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("vllm.warmroute")


class Listeners:
    """Calls that follow each change; thread-safe. They must be quick."""

    def __init__(self) -> None:
        # Guards the list: one thread tells while another adds or forgets.
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` from now on; return what ends that."""
        with self._lock:
            self._listeners.append(listener)

        def forget() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    def tell(self) -> None:
        """Call all of them, whatever they raise."""
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener()
            except Exception:  # the caller may be an I/O thread with entries in its hands
                logger.exception("a listener to the cache engine's events failed")
