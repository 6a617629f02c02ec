"""Room for chunks that come from another replica, and what becomes of them there.

The one place where a transfer's reservations and holds are taken and given
back, whatever ends it.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cacheengine.engine import CacheEngine

_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.256


@dataclass(slots=True, eq=False)
class Window:
    """Some of the chunks, in prefix order, with room reserved for each."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    arrived: list[bytes] = field(default_factory=list)
    """Chunks whose bytes are whole; the receiver adds them."""


class Arrivals:
    """Lends room for ``keys`` a window at a time, and publishes what has arrived.

    Chunks that the engine has, or is getting otherwise, are left out. With
    ``tier`` "cpu" what has arrived is held until `close`, so that the end of
    a long prefix does not evict its beginning. For a lower tier the engine
    writes it there as it does with all that is stored; windows then follow
    each other only as fast as that goes. ``prefetched``: a request is to use
    them, and it counts if none does. Thread-safe.
    """

    def __init__(
        self,
        engine: CacheEngine,
        keys: Sequence[bytes],
        *,
        tier: str,
        window_chunks: int,
        prefetched: bool = False,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._prefetched = prefetched
        self._window_chunks = window_chunks
        # Guards all below: the connections of one transfer share it.
        self._lock = threading.Lock()
        self._left = deque(keys)
        self._held: list[bytes] = []
        self._stopped = False
        self.no_room = False
        """Whether it ended for want of room."""
        self.received_chunks = 0
        """Chunks completed so far."""

    @property
    def windows_left(self) -> int:
        """How many windows there are at least to be reserved."""
        with self._lock:
            return -(-len(self._left) // self._window_chunks)

    def reserve(self) -> Window | None:
        """Return the next window; None when there is none, no room, or after `stop`."""
        with self._lock:
            while self._left and not self._stopped:
                window = self._reserve()
                if window is None:
                    self.no_room = self._stopped = True
                elif window.keys:
                    return window
        return None

    def _reserve(self) -> Window | None:
        """Return the next window, without keys if what was next is there; None: no room."""
        size = min(self._window_chunks, len(self._left))
        keys = [self._left[position] for position in range(size)]
        reservation = self._engine.prepare_store(keys)
        if reservation is None:
            return None
        if reservation.keys:
            # Of those after the last reserved it is not told which are there
            # and which found no room: they are the beginning of the next window.
            size = keys.index(reservation.keys[-1]) + 1
        for _ in range(size):
            self._left.popleft()
        return Window(reservation.keys, reservation.slots)

    def complete(self, window: Window) -> None:
        """Publish what of a window has arrived, and give the rest's room back."""
        arrived = window.arrived
        whole = set(arrived)
        lost = [key for key in window.keys if key not in whole]
        if lost:
            self._engine.complete_store(lost, success=False)
        if arrived:
            self._engine.complete_store(arrived, prefetched=self._prefetched)
        if self._tier == "cpu":
            # One that was evicted or cleared in between is simply not held.
            held = [key for key in arrived if self._engine.try_hold(key) is not None]
        else:
            held = []
            self._wait_for_puts(arrived)
        with self._lock:
            self._held += held
            self.received_chunks += len(arrived)

    def _wait_for_puts(self, keys: Sequence[bytes]) -> None:
        """Return when none of these is on its way down; lend no more if one was dropped."""
        pause_s = _SHORTEST_PAUSE_S
        while self._engine.is_putting(keys, self._tier):
            with self._lock:
                if self._stopped:
                    return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._engine.held_in(keys, self._tier) < len(keys):
            self.stop()

    def stop(self) -> None:
        """Lend no more windows; those lent are still to be completed."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Let go of what was held. Idempotent; all windows have been completed."""
        with self._lock:
            held, self._held = self._held, []
            self._stopped = True
        self._engine.release(held)
