"""What is said about a server that fails: its beginning and its end, not each call."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("vllm.warmroute")


_QUIET_S: Final = 60.0
"""After a line about an outage the next one waits so long: a server may fail every other call."""


class OutageLog:
    """Logs a server's failures, one line when they begin and one when they end.

    An outage that begins soon after one that was told is told if it lasts.
    Safe to call from several threads. ``server`` must not contain a password.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._failing_since_s: float | None = None
        self._told_s = -math.inf
        self._is_told = False
        self._is_full = False

    def failed(self, error: Exception) -> None:
        """A call failed."""
        now_s = self._clock()
        with self._lock:
            if self._failing_since_s is None:
                self._failing_since_s = now_s
            tell = not self._is_told and now_s - self._told_s >= _QUIET_S
            if tell:
                self._is_told, self._told_s = True, now_s
        if tell:
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
            was_told, self._is_told = self._is_told, False
        if since_s is not None and was_told:
            gone_s = self._clock() - since_s
            logger.warning("remote tier: %s answers again after %.1f s", self._server, gone_s)
