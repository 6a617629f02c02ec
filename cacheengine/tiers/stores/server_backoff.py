"""The breaker of a store: how long a server that failed is left alone.

The one place where a pause for a server grows. The engine above leaves a remote tier alone for
a second after a failure, so that no request waits for it, and no longer.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Final

_FIRST_S: Final = 0.2
_MOST_S: Final = 10.0


class ServerBackoff:
    """Exponential pauses after failures; safe to call from several threads.

    Each pause is twice the one before, up to ``most_s``, and then made shorter
    by up to a half at random, so that the replicas of a fleet do not come back
    all at once. After a pause one caller is let through; the others wait until
    it has succeeded or failed.
    """

    def __init__(
        self,
        *,
        first_s: float = _FIRST_S,
        most_s: float = _MOST_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._rest_s = 0.0
        self._until_s = 0.0
        self._failed_at_s = 0.0

    def now_s(self) -> float:
        """Return the time that `failed` wants to know."""
        return self._clock()

    def admit(self) -> float:
        """Return 0 when the server may be called now, else the seconds left to rest."""
        with self._lock:
            if not self._rest_s:
                return 0.0
            now_s = self._clock()
            if now_s < self._until_s:
                return self._until_s - now_s
            # This caller tries, and for as long again no other. If it never
            # reports, the next one is let through after that.
            self._until_s = now_s + self._rest_s
            return 0.0

    def succeeded(self) -> None:
        """The server answered."""
        if self._rest_s:
            with self._lock:
                self._rest_s = 0.0

    def failed(self, began_s: float) -> None:
        """A call that began then failed."""
        with self._lock:
            if self._rest_s and began_s <= self._failed_at_s:
                return  # several calls were under way: one failure of the server, not several
            self._failed_at_s = self._clock()
            self._rest_s = min(self._most_s, 2 * self._rest_s or self._first_s)
            self._until_s = self._failed_at_s + self._rest_s * (1 - self._chance() / 2)
