"""When sessions start, so that an endless workload offers a load in steady state. Pure.

**Load** is the prefill that one infinite cache for all would leave, in seconds
of one replica, over the seconds of all replicas, in the window that is
reported; the requests are due as in the ideal run. The window begins when the
run is in steady state: when almost as many sessions are under way as there
ever will be, and the fleet's GPU and CPU caches have been filled once.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, NamedTuple

from bench.simulator.model.machine import Machine
from bench.ttft import BenchError
from bench.workloads.ideal import IdealRun, IdealTurn
from bench.workloads.session import Session

WARM_UP_REQUESTS: Final = 1_000
"""Requests before the window at least; as many as in it where those are fewer."""
FILLING_REQUESTS: Final = 5_000
"""Requests after which the window is not put off any more for caches that are not full."""
TOLERANCE: Final = 0.03
"""How far the measured load may be off its label, of the label."""

_AIM: Final = 0.005
_TRIALS: Final = 40
_PROBED: Final = 1_000
"""Sessions whose lengths and loads are looked at before any has a start."""
_SETTLED: Final = 0.99
"""Share of the steady state's sessions that are under way when the window begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A session of the ideal run."""

    session: Session
    """It starts in mean gaps, not in seconds."""
    turns: Sequence[IdealTurn]
    work_s: float
    """Of one replica: the prefill that an infinite cache leaves."""

    @property
    def length_s(self) -> float:
        """From its start to the end of its last answer."""
        return self.turns[-1].offset_s + self.turns[-1].total_s


class Due(NamedTuple):
    """A request of the ideal run, in order of time."""

    at_s: float
    session: int
    turn: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """An ideal run: sessions at their starts, and which of their requests are reported."""

    planned: Sequence[Planned]
    gap_s: float
    """Mean time between two sessions' starts."""
    dues: Sequence[Due]
    """All requests that are due before the end."""
    first: int
    """Of the dues, the first that is reported."""
    begin_s: float
    end_s: float
    load: float

    @property
    def length_s(self) -> float:
        """How long the window is."""
        return self.end_s - self.begin_s

    @property
    def reported(self) -> Sequence[Due]:
        """The requests in the window."""
        return self.dues[self.first :]

    def turn(self, due: Due) -> IdealTurn:
        """Return what a due request is."""
        return self.planned[due.session].turns[due.turn]

    def sessions(self) -> list[Session]:
        """Return the sessions with their starts in seconds."""
        sessions = (each.session for each in self.planned)
        return [replace(each, start_s=each.start_s * self.gap_s) for each in sessions]

    def numbers(self) -> list[int]:
        """Return the numbers of the reported requests: turns of all sessions, in order."""
        lengths = (len(each.turns) for each in self.planned)
        firsts = list(itertools.accumulate(lengths, initial=0))
        return sorted(firsts[due.session] + due.turn for due in self.reported)


class Pacer:
    """Looks for the gap between sessions that gives a load."""

    def __init__(
        self, sessions: Iterator[Session], *, requests: int, replicas: int, machine: Machine
    ) -> None:
        self._sessions = sessions
        self._requests = requests
        self._replicas = replicas
        self._machine = machine
        self._ideal = IdealRun(machine.rates, machine.shape)
        self._planned: list[Planned] = []
        self._plan(_PROBED)
        lengths_s = [each.length_s for each in self._planned]
        self._settled_s = settled_s(lengths_s)

    def paced(self, load: float) -> Window:
        """Return the run whose measured load is nearest the label.

        Raises `BenchError` where that is off by more than `TOLERANCE`.
        """
        probed_s = sum(each.work_s for each in self._planned[:_PROBED])
        gap_s = probed_s / _PROBED / (load * self._replicas)
        best: Window | None = None
        for trial in range(_TRIALS):
            window = self._window(gap_s)
            if best is None or abs(window.load - load) < abs(best.load - load):
                best = window
            if abs(best.load / load - 1) <= _AIM:
                break
            # Where single requests weigh much, full steps would jump to and fro.
            gap_s *= (window.load / load) ** (1.0 if trial < 5 else 0.5)
        assert best is not None
        if abs(best.load / load - 1) > TOLERANCE:
            raise BenchError(
                f"load {load:g} cannot be reached with {self._requests} requests: {best.load:.3f} "
                "is the nearest; give more requests, so that a single one weighs less"
            )
        return best

    def _window(self, gap_s: float) -> Window:
        count = _PROBED
        while True:
            self._plan(count)
            dues = self._dues(gap_s, count)
            # A later session may begin before requests that are due after the last start.
            known_s = self._planned[count - 1].session.start_s * gap_s
            begin_s = max(self._settled_s, self._filled_s(dues))
            first = bisect_left(dues, begin_s, key=itemgetter(0))
            end = self._end(dues, first)
            if end is not None and dues[end].at_s <= known_s:
                return self._measured(gap_s, dues[:end], first, begin_s, dues[end].at_s)
            count += max(_PROBED, count // 2)

    def _dues(self, gap_s: float, count: int) -> list[Due]:
        return sorted(
            Due(each.session.start_s * gap_s + turn.offset_s, index, number)
            for index, each in enumerate(itertools.islice(self._planned, count))
            for number, turn in enumerate(each.turns)
        )

    def _filled_s(self, dues: Sequence[Due]) -> float:
        """Return when enough requests were due, and as many tokens as all caches hold."""
        left_tokens = self._replicas * (self._machine.shape.gpu_tokens + self._machine.cpu_tokens)
        least = min(WARM_UP_REQUESTS, self._requests)
        for count, (at_s, session, number) in enumerate(dues):
            if count >= FILLING_REQUESTS or (count >= least and left_tokens <= 0):
                return at_s
            turn = self._planned[session].turns[number]
            left_tokens -= turn.computed_tokens + turn.output_tokens
        return dues[-1].at_s

    def _end(self, dues: Sequence[Due], first: int) -> int | None:
        """Return where the requests of the window end: those due together stay together."""
        end = first + self._requests
        while end < len(dues) and dues[end].at_s == dues[end - 1].at_s:
            end += 1
        return end if end < len(dues) else None

    def _measured(
        self, gap_s: float, dues: list[Due], first: int, begin_s: float, end_s: float
    ) -> Window:
        rates = self._machine.rates
        work_s = 0.0
        for due in itertools.islice(dues, first, None):
            turn = self._planned[due.session].turns[due.turn]
            work_s += rates.prefill_s(turn.computed_tokens, turn.matched_tokens)
        started = 1 + max(due.session for due in dues)
        return Window(
            planned=self._planned[:started],
            gap_s=gap_s,
            dues=dues,
            first=first,
            begin_s=begin_s,
            end_s=end_s,
            load=work_s / self._replicas / (end_s - begin_s),
        )

    def _plan(self, count: int) -> None:
        """Have so many sessions answered."""
        rates = self._machine.rates
        while len(self._planned) < count:
            session = next(self._sessions)
            turns = self._ideal.answer(session)
            work_s = sum(rates.prefill_s(t.computed_tokens, t.matched_tokens) for t in turns)
            self._planned.append(Planned(session=session, turns=turns, work_s=work_s))


def settled_s(lengths_s: Sequence[float]) -> float:
    """Return when `_SETTLED` of the steady state's sessions are under way, if starts are even.

    By then, of the time that sessions last, that share is before it: the mean
    of the lengths cut there is so much of their mean. At least the mean itself.
    """
    ordered_s = sorted(lengths_s)
    whole_s, before_s = sum(ordered_s), 0.0
    for index, length_s in enumerate(ordered_s):
        longer = len(ordered_s) - index
        if before_s + longer * length_s >= _SETTLED * whole_s:
            cut_s = (_SETTLED * whole_s - before_s) / longer
            return max(cut_s, whole_s / len(ordered_s))
        before_s += length_s
    return 0.0
