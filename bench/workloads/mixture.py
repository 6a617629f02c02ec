"""What one fleet has to serve at once: chats, coding agents and documents.

Two of three sessions are chats, the rest agents and documents in equal
numbers. A third of each kind asks for its answers whole, not as a stream.
Answers are 1 to 2,000 tokens.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from bench.workloads.agents import agent_sessions
from bench.workloads.generated import length, poisson
from bench.workloads.session import Session, Span, Turn

_KINDS: Final = ("chat", "chat", "chat", "chat", "agent", "document")
_MOST_ANSWER_TOKENS: Final = 2_000
_SYSTEM_TOKENS: Final = 1_000
_NOT_STREAMED_EVERY: Final = 3
_CHAT_PAUSE_S: Final = 12.0


def mixture(seed: int) -> Iterator[Session]:
    """Return sessions of all kinds, endlessly; starts are in mean gaps between them."""
    chooser = random.Random(f"mixture {seed}")
    numbers = itertools.count()
    kinds = {
        "agent": agent_sessions(chooser, numbers),
        "chat": _chats(chooser, numbers),
        "document": _documents(chooser, numbers),
    }
    asking = {kind: _asking(sessions) for kind, sessions in kinds.items()}
    mixed = (next(asking[chooser.choice(_KINDS)]) for _ in itertools.count())
    return poisson(mixed, chooser)


def _chats(chooser: random.Random, numbers: Iterator[int]) -> Iterator[Session]:
    system = Span(next(numbers), _SYSTEM_TOKENS)
    for index in itertools.count():
        turns = [
            Turn(
                (*((system,) if turn == 0 else ()), Span(next(numbers), _said_tokens(chooser))),
                length(chooser, 200, _MOST_ANSWER_TOKENS, least=1, sigma=1.2),
                chooser.expovariate(1 / _CHAT_PAUSE_S),
            )
            for turn in range(length(chooser, 4, 20, least=1))
        ]
        yield Session(0.0, tuple(turns), f"chat-{index}")


def _said_tokens(chooser: random.Random) -> int:
    return length(chooser, 400, 16_000, sigma=1.3)


def _documents(chooser: random.Random, numbers: Iterator[int]) -> Iterator[Session]:
    """Return documents with one question each: some answers are a word, some a summary."""
    for _ in itertools.count():
        document = Span(next(numbers), length(chooser, 12_000, 90_000))
        answer_tokens = length(chooser, 20, _MOST_ANSWER_TOKENS, least=1, sigma=1.6)
        yield Session(0.0, (Turn((document,), answer_tokens),))


def _asking(sessions: Iterator[Session]) -> Iterator[Session]:
    """Let every third session ask for whole answers, and none for longer ones than `_MOST...`."""
    for index, session in enumerate(sessions):
        streamed = index % _NOT_STREAMED_EVERY != 0
        turns = tuple(
            replace(
                each,
                streamed=streamed,
                output_tokens=min(each.output_tokens, _MOST_ANSWER_TOKENS),
            )
            for each in session.turns
        )
        yield replace(session, turns=turns)
