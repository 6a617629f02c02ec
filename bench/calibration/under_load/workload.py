"""What both fleets are sent: sessions about documents, at a known share of what they can do. Pure.

Each session reads one document and asks about it, turn after turn; all begin with
the same system prompt. Starts follow the work that they bring, so that the load is
the same from the first session to the last.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bench.calibration.replica import TOKENS
from bench.simulator.model.machine import Machine
from bench.simulator.model.rates import Rates, Shape
from bench.workloads.session import Session, Span, Turn

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
    """Sessions, and how much of two replicas' time they ask for."""

    sessions: Sequence[Session]
    """In order of their starts, none after ``end_s``."""
    warm_up_s: float
    end_s: float
    reported: frozenset[int]
    """Requests, numbered session by session, that are due in between if all answers take no
    time: the same ones whoever answers."""
    real_load: float
    """Prefill that an infinite cache leaves, over what the replicas can prefill."""
    raw_load: float
    """The same without a cache."""
    decode_load: float
    """What the decodes take beside if each has its steps alone: the most that they can."""


@dataclass(frozen=True, slots=True)
class _Due:
    number: int
    at_s: float
    prefill_s: float
    raw_s: float
    decode_s: float


def offered(
    machine: Machine, *, replicas: int, load: float, warm_up_s: float, window_s: float, seed: int
) -> Offered:
    """Return sessions that ask for ``load`` of the replicas' prefill in the window.

    A request is due when its session's pauses have passed, as if answers took no time.
    """
    end_s = warm_up_s + window_s
    sessions: list[Session] = []
    start_s = 0.0
    chooser = random.Random(f"under load {seed}")
    for session in _sessions(chooser):
        lasts_s = sum(each.prefill_s for each in _dues(session, 0, machine)) / (replicas * load)
        # Anywhere within its share of the time: not all at the same distance.
        at_s = start_s + chooser.random() * lasts_s
        start_s += lasts_s
        if start_s > end_s:
            break
        sessions.append(Session(at_s, session.turns, session.name))
    sessions.sort(key=lambda each: each.start_s)
    dues = _all_dues(sessions, machine)
    some = [each for each in dues if warm_up_s <= each.at_s < end_s]
    time_s = replicas * window_s
    return Offered(
        sessions=sessions,
        warm_up_s=warm_up_s,
        end_s=end_s,
        reported=frozenset(each.number for each in some),
        real_load=sum(each.prefill_s for each in some) / time_s,
        raw_load=sum(each.raw_s for each in some) / time_s,
        decode_load=sum(each.decode_s for each in some) / time_s,
    )


def token_ids(span: Span, *, seed: int) -> list[int]:
    """Return a span's tokens: ids that the real model and the simulated one know."""
    return random.Random(f"{seed}:{span.number}").choices(TOKENS, k=span.tokens)


def prefill_s(rates: Rates, shape: Shape, tokens: int, context_tokens: int) -> float:
    """Return how long a replica that does nothing else computes so many tokens."""
    steps = math.ceil(tokens / shape.max_batched_tokens)
    return steps * rates.step_s + rates.prefill_s(tokens, context_tokens)


def _sessions(chooser: random.Random) -> Iterator[Session]:
    number = 0
    while True:
        turns = []
        for turn in range(TURNS):
            question = Span(2 * TURNS * number + 2 * turn + 1, _length(chooser, _QUESTION_TOKENS))
            spans: tuple[Span, ...] = (question,)
            if turn == 0:
                document = Span(2 * TURNS * number + 2, _length(chooser, _DOCUMENT_TOKENS))
                spans = (Span(0, _SYSTEM_TOKENS), document, question)
            pause_s = chooser.expovariate(1 / THINK_S)
            turns.append(Turn(spans, chooser.randint(*ANSWER_TOKENS), pause_s))
        yield Session(0.0, tuple(turns), f"user-{number}")
        number += 1


def _length(chooser: random.Random, bounds: tuple[int, int, int]) -> int:
    median, least, most = bounds
    return max(least, min(most, round(median * chooser.lognormvariate(0.0, _LENGTH_SPREAD))))


def _all_dues(sessions: Sequence[Session], machine: Machine) -> list[_Due]:
    dues: list[_Due] = []
    number = 0
    for session in sessions:
        dues += _dues(session, number, machine)
        number += len(session.turns)
    return dues


def _dues(session: Session, number: int, machine: Machine) -> Iterator[_Due]:
    rates, shape = machine.rates, machine.shape
    at_s, history, computed = session.start_s, 0, _SYSTEM_TOKENS
    for index, turn in enumerate(session.turns):
        at_s += turn.pause_s if index else 0.0
        prompt = history + turn.tokens
        cached = min(computed, prompt - 1) // shape.block_tokens * shape.block_tokens
        yield _Due(
            number=number + index,
            at_s=at_s,
            prefill_s=prefill_s(rates, shape, prompt - cached, cached),
            raw_s=prefill_s(rates, shape, prompt, 0),
            decode_s=(turn.output_tokens - 1) * rates.decode_s(1, prompt),
        )
        history = prompt + turn.output_tokens
        computed = history - 1  # an answer's last token is never run
