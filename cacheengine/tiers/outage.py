"""What is said about a server that fails: its beginning and its end, not each call."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("vllm.warmroute")


class OutageLog:
    """Logs a server's failures, one line when they begin and one when they end.

    Safe to call from several threads. ``server`` must not contain a password.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._failing_since_s: float | None = None
        self._is_full = False

    def failed(self, error: Exception) -> None:
        """A call failed."""
        with self._lock:
            began = self._failing_since_s is None
            if began:
                self._failing_since_s = self._clock()
        if began:
            logger.warning("remote tier: %s fails, so it is missed: %s", self._server, error)

    def refused(self, error: Exception) -> None:
        """A put was refused for want of room: the server is well otherwise."""
        self.answered()
        with self._lock:
            began, self._is_full = not self._is_full, True
        if began:
            logger.warning("remote tier: %s takes no more: %s", self._server, error)

    def stored(self) -> None:
        """A put succeeded."""
        self._is_full = False
        self.answered()

    def answered(self) -> None:
        """A call succeeded."""
        if self._failing_since_s is None:
            return  # no lock on the way that is nearly always taken; a later call sees the rest
        with self._lock:
            since_s, self._failing_since_s = self._failing_since_s, None
        if since_s is not None:
            gone_s = self._clock() - since_s
            logger.warning("remote tier: %s answers again after %.1f s", self._server, gone_s)
