"""What the fleets are sent: sessions about documents, at a known share of what they can do. Pure.

Each session reads one document and asks about it, turn after turn; all begin with
the same system prompt. Loads and windows are those of the proof (`bench.workloads.pacing`).
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bench.calibration.replica import TOKENS
from bench.workloads.generated import poisson
from bench.workloads.pacing import Pacer
from bench.workloads.session import Session, Span, Turn
from simulator.model.machine import Machine

TURNS: Final = 4
THINK_S: Final = 6.0
"""Mean time from an answer to the next question."""
ANSWER_TOKENS: Final = (4, 12)
"""Short: where the model runs on a core, decodes take time that prefill would have."""
_SYSTEM_TOKENS: Final = 256
_DOCUMENT_TOKENS: Final = (3_000, 1_000, 6_000)
"""Median, least, most."""
_QUESTION_TOKENS: Final = (250, 60, 800)
_LENGTH_SPREAD: Final = 0.5
"""Sigma of the (lognormal) lengths."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Sessions at a load; the words are those of `bench.workloads.offered`."""

    sessions: Sequence[Session]
    """In order of their starts."""
    warm_up_s: float
    end_s: float
    reported: frozenset[int]
    """Numbers of the requests that the ideal run has due between the two."""
    real_load: float
    raw_load: float


def offered(machine: Machine, *, replicas: int, load: float, requests: int, seed: int) -> Offered:
    """Return sessions that offer equal machines a load, so many of their requests reported.

    Raises `bench.ttft.BenchError` where so few requests cannot have that load.
    """
    pacer = Pacer(_sessions(seed), requests=requests, replicas=replicas, machine=machine)
    window = pacer.paced(load)
    turns = [window.turn(due) for due in window.reported]
    raw_s = sum(machine.rates.prefill_s(each.prompt_tokens) for each in turns)
    return Offered(
        sessions=window.sessions(),
        warm_up_s=window.begin_s,
        end_s=window.end_s,
        reported=frozenset(window.numbers()),
        real_load=window.load,
        raw_load=raw_s / replicas / window.length_s,
    )


def token_ids(span: Span, *, seed: int) -> list[int]:
    """Return a span's tokens: ids that the real model and the simulated one know."""
    return random.Random(f"{seed}:{span.number}").choices(TOKENS, k=span.tokens)


def _sessions(seed: int) -> Iterator[Session]:
    """Yield sessions that start in mean gaps between them."""
    chooser = random.Random(f"under load {seed}")
    numbers = itertools.count(1)
    return poisson((_reader(chooser, numbers, index) for index in itertools.count()), chooser)


def _reader(chooser: random.Random, numbers: Iterator[int], index: int) -> Session:
    document = (
        Span(0, _SYSTEM_TOKENS),
        Span(next(numbers), _length(chooser, _DOCUMENT_TOKENS)),
    )
    turns = tuple(
        Turn(
            (
                *(document if turn == 0 else ()),
                Span(next(numbers), _length(chooser, _QUESTION_TOKENS)),
            ),
            chooser.randint(*ANSWER_TOKENS),
            chooser.expovariate(1 / THINK_S),
        )
        for turn in range(TURNS)
    )
    return Session(0.0, turns, f"user-{index}")


def _length(chooser: random.Random, bounds: tuple[int, int, int]) -> int:
    median, least, most = bounds
    return max(least, min(most, round(median * chooser.lognormvariate(0.0, _LENGTH_SPREAD))))
