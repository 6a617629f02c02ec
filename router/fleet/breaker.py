"""A circuit breaker: a replica whose requests fail gets none for a while, and is then tried.

It counts the results of requests, since health checks may pass at a replica that answers every
request with 503. Failures in a row, or a large share of failures within a window, open it. The time
doubles while trials fail. Then one request at a time is sent as a trial, until one succeeds.
"""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Final

from router.config.settings import BreakerConfig
from warmroute_common.command_line import counted

_TELLING: Final = 10
"""Results in the window, below which a share of failures says little."""
_SLICES: Final = 10
"""Parts of the window; the oldest one is dropped at a time."""
_TRIAL_S: Final = 5.0
"""Seconds without a result after which another trial may start: answers that are not streamed
begin with their last token, and the fleet must not wait for that."""
_JITTER: Final = 0.25
"""Random share by which the time is shortened, so that several routers do not try at once."""

_TRIAL_FAILED: Final = "a trial failed"


class Circuit(StrEnum):
    """Whether requests get through to a replica."""

    CLOSED = "closed"
    OPEN = "open"
    """No requests, while another replica can answer."""
    HALF_OPEN = "half-open"
    """One request at a time."""


class Sign(StrEnum):
    """What can change that."""

    TRIPPED = "tripped"
    """Too many failures."""
    DUE = "due"
    """Its time is over, or the replica was down and is up again."""
    SUCCEEDED = "succeeded"
    """A trial."""
    FAILED = "failed"
    """A trial."""
    TAKEN_BACK = "taken back"
    """Failures without which it would not have opened."""


TRANSITIONS: Final[Mapping[tuple[Circuit, Sign], Circuit]] = MappingProxyType(
    {
        (Circuit.CLOSED, Sign.TRIPPED): Circuit.OPEN,
        (Circuit.OPEN, Sign.DUE): Circuit.HALF_OPEN,
        (Circuit.OPEN, Sign.TAKEN_BACK): Circuit.CLOSED,
        (Circuit.HALF_OPEN, Sign.SUCCEEDED): Circuit.CLOSED,
        (Circuit.HALF_OPEN, Sign.FAILED): Circuit.OPEN,
    }
)
"""The next state; a pair that is not here changes nothing."""


class Breaker:
    """The breaker of one replica; initially closed."""

    __slots__ = (
        "_closed_s",
        "_doublings",
        "_in_a_row",
        "_results",
        "_trial",
        "_trials",
        "_trials_before",
        "due_s",
        "openings",
        "state",
        "why",
    )

    def __init__(self) -> None:
        self.state = Circuit.CLOSED
        self.due_s = inf
        """When `pass_time` will let a trial through, if nothing happens before."""
        self.openings = 0
        """How often it has opened, ever."""
        self.why = ""
        """Why it opened last, in words; empty while it is closed."""
        self._in_a_row = 0
        self._results = _Window()
        self._doublings = 0
        """How often the open time was doubled."""
        self._closed_s = -inf
        """When a trial closed it last."""
        self._trials = 0
        self._trials_before = 0
        """Of earlier times that it was open: their results come too late."""
        self._trial = 0
        """The number of the trial that has no verdict yet; 0 if there is none, or it takes long."""

    @property
    def admits(self) -> bool:
        """Whether a request may go to the replica although another replica could answer."""
        return self.state is Circuit.CLOSED or (self.state is Circuit.HALF_OPEN and not self._trial)

    def pass_time(self, now_s: float) -> bool:
        """Note how late it is; return whether that let a trial through."""
        if now_s < self.due_s:
            return False
        self.due_s = inf
        self._trial = 0
        self._receive(Sign.DUE)
        return True

    def came_back(self) -> bool:
        """Note that the replica was down and is up again; return whether a trial may go now."""
        return self.state is Circuit.OPEN and self.pass_time(self.due_s)

    def begin(self, now_s: float) -> int:
        """Note that the replica gets a request; return its number as a trial, or 0 if it is none.

        A trial's end must be told to `end_trial`.
        """
        if self.state is not Circuit.HALF_OPEN or self._trial:
            return 0
        self._trials += 1
        self._trial = self._trials
        self.due_s = now_s + _TRIAL_S
        return self._trial

    def end_trial(self, trial: int) -> bool:
        """Note that a trial is over, perhaps without a verdict; return whether another may go."""
        if not trial or trial != self._trial:
            return False
        self._trial, self.due_s = 0, inf
        return True

    def note(
        self, ok: bool, now_s: float, config: BreakerConfig, *, trial: int = 0, jitter: float = 0.0
    ) -> bool:
        """Note what became of a request; return whether that opened or closed it.

        ``trial`` is what `begin` returned for that request, ``jitter`` a random number from 0 to 1.
        While it is not closed, trials alone count: the other requests began before, or were sent
        for want of another replica.
        """
        if self.state is Circuit.CLOSED:
            return self._note_result(ok, now_s, config, jitter)
        if self.state is Circuit.OPEN or trial <= self._trials_before:
            return False
        if ok:
            self._close(now_s)
        else:
            self._doublings += 1
            self._open(Sign.FAILED, _TRIAL_FAILED, now_s, config, jitter)
        return True

    def take_back(self, now_s: float, config: BreakerConfig) -> bool:
        """Forget a failure that was noted; return whether that lets requests through again.

        For a request that other replicas fail at too. A failed trial is not proved wrong by that,
        but the next trial may go at once.
        """
        if self.state is Circuit.OPEN and self.why == _TRIAL_FAILED:
            self._doublings = max(0, self._doublings - 1)
            self.due_s = now_s
            return True
        self._in_a_row = max(0, self._in_a_row - 1)
        self._results.take_back()
        if self.state is not Circuit.OPEN or self._why_open(config):
            return False
        self._receive(Sign.TAKEN_BACK)
        self.why, self.due_s = "", inf
        return True

    def check(self) -> None:
        """Raise AssertionError if its parts contradict each other."""
        assert (self.state is Circuit.CLOSED) == (not self.why)
        assert self.state is not Circuit.OPEN or (self.due_s < inf and not self._trial)
        assert self.state is Circuit.HALF_OPEN or not self._trial
        assert self.state is not Circuit.CLOSED or self.due_s == inf
        assert (self.state is Circuit.HALF_OPEN and self.due_s < inf) == bool(self._trial)
        assert self._trial <= self._trials

    def _note_result(self, ok: bool, now_s: float, config: BreakerConfig, jitter: float) -> bool:
        self._in_a_row = 0 if ok else self._in_a_row + 1
        self._results.add(ok, now_s, config.window_s)
        if ok or not config.enabled:
            return False
        if not (why := self._why_open(config)):
            return False
        # One that opens again soon after it was closed is as ill as before.
        was_well = now_s - self._closed_s > config.max_open_s
        self._doublings = 0 if was_well else self._doublings + 1
        self._open(Sign.TRIPPED, why, now_s, config, jitter)
        return True

    def _why_open(self, config: BreakerConfig) -> str:
        """Return why the results should open it; empty if they should not."""
        failed, count = self._results.failed, self._results.count
        if self._in_a_row >= config.failures_in_a_row:
            return f"{counted(self._in_a_row, 'request')} in a row failed"
        if count >= _TELLING and failed >= config.failure_share * count:
            return f"{failed} of {count} requests failed within {config.window_s:g} s"
        return ""

    def _open(
        self, sign: Sign, why: str, now_s: float, config: BreakerConfig, jitter: float
    ) -> None:
        self._receive(sign)
        self.why = why
        self.openings += 1
        # Bounded before it is doubled: a float has no room for a thousand doublings.
        doublings = min(self._doublings, 32)
        open_s = min(config.max_open_s, config.open_s * 2.0**doublings)
        self.due_s = now_s + open_s * (1.0 - _JITTER * jitter)
        self._trial, self._trials_before = 0, self._trials

    def _close(self, now_s: float) -> None:
        self._receive(Sign.SUCCEEDED)
        self.why, self.due_s, self._closed_s = "", inf, now_s
        self._trial, self._in_a_row, self._results = 0, 0, _Window()

    def _receive(self, sign: Sign) -> None:
        self.state = TRANSITIONS.get((self.state, sign), self.state)

    def __repr__(self) -> str:
        return f"<Breaker {self.state} due_s={self.due_s:g} trial={self._trial}>"


class _Window:
    """How many of the recent requests have failed."""

    __slots__ = ("_slices", "count", "failed")

    def __init__(self) -> None:
        self._slices: deque[list[int]] = deque()
        """Each with its number, its results and the failures among them."""
        self.count = 0
        self.failed = 0

    def add(self, ok: bool, now_s: float, window_s: float) -> None:
        number = int(now_s * _SLICES / window_s)
        while self._slices and self._slices[0][0] <= number - _SLICES:
            _, count, failed = self._slices.popleft()
            self.count -= count
            self.failed -= failed
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        self._slices[-1][1] += 1
        self._slices[-1][2] += not ok
        self.count += 1
        self.failed += not ok

    def take_back(self) -> None:
        """Remove the latest failure, if it is not too long ago."""
        for each in reversed(self._slices):
            if each[2]:
                each[1] -= 1
                each[2] -= 1
                self.count -= 1
                self.failed -= 1
                return
