"""When sessions start, so that an endless workload offers a load in steady state. Pure.

**Load** is the time of one replica that requests take if one infinite cache for all
leaves as little prefill as can be, over the time of all replicas, in the window that
is reported: that prefill, the steps that carry it, and what decoding the answers adds
to steps. A load of 1 is all that a fleet can prefill beside its decodes. The requests
are due as in the ideal run. The window begins when the
run is in steady state: when almost as many sessions are under way as there
ever will be, and the fleet's GPU and CPU caches have been filled once.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, NamedTuple

from bench.ttft import BenchError
from bench.workloads.ideal import IdealRun, IdealTurn
from bench.workloads.session import Session
from simulator.model.replica_machine import Machine

WARM_UP_REQUESTS: Final = 1_000
"""Requests before the window at least; as many as in it where those are fewer."""
FILLING_REQUESTS: Final = 5_000
"""Requests after which the window is not put off any more for caches that are not full."""
TOLERANCE: Final = 0.03
"""How far the measured load may be off its label, of the label."""

_AIM: Final = 0.01
_TRIALS: Final = 8
"""Of gaps between sessions, for one beginning of the window."""
_WHOLE_STEPS: Final = 4
"""Trials after which the gap is moved by half of what seems to be missing."""
_BEGINNINGS: Final = 6
"""Starts of the window, each later than the one before by half of the warm-up."""
_PROBED: Final = 1_000
"""Sessions whose lengths and loads are looked at before any has a start."""
_FARTHEST: Final = 1.5
"""Factor by which the gap may differ from what the sessions' mean work asks for: a window
that has its load at another gap only is one of few requests, not of the steady state."""
_SETTLED: Final = 0.99
"""Share of the steady state's sessions that are under way when the window begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A session of the ideal run."""

    session: Session
    """It starts in mean gaps, not in seconds."""
    turns: Sequence[IdealTurn]
    work_s: float
    """Work of one replica; see `work_s`."""

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
    """Index of the first request that is reported."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A gap between sessions, and the load that it gives."""

    gap_s: float
    dues: Sequence[tuple[float, int, int]]
    """As `Due` has them; of many trials one is kept."""
    first: int
    begin_s: float
    end_s: float
    load: float

    def error(self, load: float) -> float:
        """Return how far it is off a label, of the label."""
        return abs(self.load / load - 1)


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
        self._needed = _PROBED
        self._plan(_PROBED)
        lengths_s = [each.length_s for each in self._planned]
        self._settled_s = settled_s(lengths_s)

    def paced(self, load: float) -> Window:
        """Return the run whose measured load is nearest the label.

        Raises `BenchError` where that is off by more than `TOLERANCE`.
        """
        # Where single requests weigh much, loads jump to and fro: then the window
        # begins later, and the search starts again.
        found: list[_Trial] = []
        for later in range(_BEGINNINGS):
            found.append(self._search(load, later / 2))
            if found[-1].error(load) <= _AIM:
                return self._kept(found[-1])
        best = min(found, key=lambda each: each.error(load))
        if best.error(load) > TOLERANCE:
            raise BenchError(
                f"load {load:g} cannot be reached with {self._requests} requests: "
                f"{best.load:.3f} is the nearest; give more requests, so that a single one "
                "weighs less"
            )
        return self._kept(best)

    def _search(self, load: float, later: float) -> _Trial:
        """Return the best of some trials whose loads come nearer and nearer to the label."""
        work_s = sum(each.work_s for each in self._planned[:_PROBED]) / _PROBED
        gap_s = expected_s = work_s / (load * self._replicas)
        trials: list[_Trial] = []
        while len(trials) < _TRIALS:
            trials.append(self._trial(gap_s, later))
            if trials[-1].error(load) <= _AIM / 2:
                break
            gap_s *= (trials[-1].load / load) ** (1.0 if len(trials) < _WHOLE_STEPS else 0.5)
            gap_s = min(max(gap_s, expected_s / _FARTHEST), expected_s * _FARTHEST)
        return min(trials, key=lambda each: each.error(load))

    def _trial(self, gap_s: float, later: float) -> _Trial:
        """Try a gap; ``later`` stretches the warm-up by that share."""
        while True:
            count = self._needed
            self._plan(count)
            dues = self._dues(gap_s, count)
            # A later session may begin before requests that are due after the last start.
            known_s = self._planned[count - 1].session.start_s * gap_s
            begin_s = (1 + later) * max(self._settled_s, self._filled_s(dues))
            first = bisect_left(dues, begin_s, key=itemgetter(0))
            end = self._end(dues, first)
            if end is not None and dues[end][0] <= known_s:
                end_s = dues[end][0]
                work_s = self._work_s(dues[first:end])
                return _Trial(
                    gap_s=gap_s,
                    dues=dues[:end],
                    first=first,
                    begin_s=begin_s,
                    end_s=end_s,
                    load=work_s / self._replicas / (end_s - begin_s),
                )
            self._needed += max(_PROBED, count // 2)

    def _dues(self, gap_s: float, count: int) -> list[tuple[float, int, int]]:
        return sorted(
            (each.session.start_s * gap_s + turn.offset_s, index, number)
            for index, each in enumerate(itertools.islice(self._planned, count))
            for number, turn in enumerate(each.turns)
        )

    def _filled_s(self, dues: Sequence[tuple[float, int, int]]) -> float:
        """Return when enough requests were due, and as many tokens as all caches hold."""
        left_tokens = self._replicas * (self._machine.shape.gpu_tokens + self._machine.cpu_tokens)
        least = min(WARM_UP_REQUESTS, self._requests)
        for count, (at_s, session, number) in enumerate(dues):
            if count >= FILLING_REQUESTS or (count >= least and left_tokens <= 0):
                return at_s
            turn = self._planned[session].turns[number]
            left_tokens -= turn.computed_tokens + turn.output_tokens
        return dues[-1][0]

    def _end(self, dues: Sequence[tuple[float, int, int]], first: int) -> int | None:
        """Return where the requests of the window end: those due together stay together."""
        end = first + self._requests
        while end < len(dues) and dues[end][0] == dues[end - 1][0]:
            end += 1
        return end if end < len(dues) else None

    def _work_s(self, dues: Sequence[tuple[float, int, int]]) -> float:
        """Return the time of one replica that these take."""
        turns = (self._planned[session].turns[number] for _, session, number in dues)
        return sum(work_s(turn, self._machine) for turn in turns)

    def _kept(self, trial: _Trial) -> Window:
        started = 1 + max(session for _, session, _ in trial.dues)
        return Window(
            planned=self._planned[:started],
            gap_s=trial.gap_s,
            dues=[Due(*each) for each in trial.dues],
            first=trial.first,
            begin_s=trial.begin_s,
            end_s=trial.end_s,
            load=trial.load,
        )

    def _plan(self, count: int) -> None:
        """Have this many sessions answered."""
        while len(self._planned) < count:
            session = next(self._sessions)
            turns = self._ideal.answer(session)
            total_s = sum(work_s(turn, self._machine) for turn in turns)
            self._planned.append(Planned(session=session, turns=turns, work_s=total_s))


def work_s(turn: IdealTurn, machine: Machine) -> float:
    """Return the time of one replica that a request takes whose prefix is all cached.

    Its prefill, its part of the steps that carry that, and what each token of its answer
    adds to a step.
    """
    rates = machine.rates
    prefill_s = rates.prefill_s(turn.computed_tokens, turn.matched_tokens)
    steps_s = turn.computed_tokens / machine.shape.max_batched_tokens * rates.step_s
    per_token_s = rates.decode_s(1, turn.prompt_tokens) - rates.step_s
    return prefill_s + steps_s + turn.output_tokens * per_token_s


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
