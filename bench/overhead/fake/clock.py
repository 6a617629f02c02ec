"""One timer for all slow streams: an event of each every 20 ms, each in a phase of its own.

A timer for each event of 200 streams would cost more than to send them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from bench.overhead.case import EVENT_GAP_S

Step = Callable[[], bool]
"""Sends a stream's next event; returns whether more will come."""

_PHASES: Final = round(EVENT_GAP_S * 1000)


class StreamClock:
    """Steps every stream once in each `EVENT_GAP_S`, to the millisecond it began at.

    The timer runs only while there are streams. A millisecond that comes late
    is made up for, so that streams take their time and no more.
    """

    def __init__(self, now: Callable[[], float], call_at: Callable[..., object]) -> None:
        """``now`` and ``call_at``: the event loop's ``time`` and ``call_at``."""
        self._now = now
        self._call_at = call_at
        self._phases: list[deque[Step]] = [deque() for _ in range(_PHASES)]
        self._streams = 0
        self._next_ms = 0

    @classmethod
    def of_loop(cls) -> "StreamClock":
        """Return one that runs by the running event loop."""
        loop = asyncio.get_running_loop()
        return cls(loop.time, loop.call_at)

    def add(self, step: Step) -> None:
        """Step a stream from now on, for the first time when `EVENT_GAP_S` has passed."""
        now_ms = int(self._now() * 1000)
        if not self._streams:
            self._next_ms = now_ms + 1
            self._call_at(self._next_ms / 1000, self._run)
        self._streams += 1
        # Where the timer is late, the current millisecond is yet to be run: too early by a gap.
        self._phases[min(now_ms, self._next_ms - 1) % _PHASES].append(step)

    def _run(self) -> None:
        now_ms = int(self._now() * 1000)
        while self._next_ms <= now_ms:
            self._run_phase(self._phases[self._next_ms % _PHASES])
            self._next_ms += 1
        if self._streams:
            self._call_at(self._next_ms / 1000, self._run)

    def _run_phase(self, phase: deque[Step]) -> None:
        for _ in range(len(phase)):
            step = phase.popleft()
            if step():
                phase.append(step)
            else:
                self._streams -= 1
