"""Workloads that are made up, each from a seed.

- rounds: users who ask about a document of their own, round after round, all
  behind one system prompt; the next question comes after a time to think.
- agents: a long prompt of tools, a context that grows with each tool's answer,
  and short pauses while the tool runs.
- burst: the same cold prompt a hundred times at once, again and again.
- unique: no two prompts have anything in common; no cache can help.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Final

from bench.workloads.session import Session, Span, Turn, spread, with_starts

BURST_REQUESTS: Final = 100
"""Identical prompts that come at once."""

_SYSTEM_TOKENS: Final = 1_500
_ROUNDS: Final = 8
_THINK_S: Final = 15.0
_TOOLS_TOKENS: Final = 4_000
_AGENT_STEPS: Final = 20
_TOOL_S: Final = 2.0
_BURST_TOKENS: Final = 8_000
_LENGTH_SPREAD: Final = 0.8
"""Sigma of the (lognormal) lengths."""


def rounds(requests: int, *, seed: int, tokens_per_s: float) -> list[Session]:
    """Return users with `_ROUNDS` questions each, starting one after the other."""
    chooser = random.Random(f"rounds {seed}")
    numbers = itertools.count(1)

    def session(index: int, turns: int) -> Session:
        document = _length(chooser, 3_000, 32_000)
        first = (Span(0, _SYSTEM_TOKENS), Span(next(numbers), document))
        told = [
            Turn(
                (*(first if turn == 0 else ()), Span(next(numbers), _length(chooser, 150, 2_000))),
                _length(chooser, 200, 1_000),
                chooser.expovariate(1 / _THINK_S),
            )
            for turn in range(turns)
        ]
        return Session(0.0, tuple(told), f"user-{index}")

    return _spread_evenly(_sessions(requests, _ROUNDS, session), chooser, tokens_per_s)


def agents(requests: int, *, seed: int, tokens_per_s: float) -> list[Session]:
    """Return agents whose context grows over `_AGENT_STEPS` steps."""
    chooser = random.Random(f"agents {seed}")
    numbers = itertools.count(1)

    def session(index: int, steps: int) -> Session:
        task = (Span(0, _TOOLS_TOKENS), Span(next(numbers), _length(chooser, 4_000, 32_000)))
        told = [
            Turn(
                task if step == 0 else (Span(next(numbers), _length(chooser, 800, 8_000)),),
                _length(chooser, 120, 600),
                chooser.expovariate(1 / _TOOL_S),
            )
            for step in range(steps)
        ]
        return Session(0.0, tuple(told), f"agent-{index}")

    return _spread_evenly(_sessions(requests, _AGENT_STEPS, session), chooser, tokens_per_s)


def burst(requests: int, *, seed: int, tokens_per_s: float) -> list[Session]:
    """Return bursts of `BURST_REQUESTS` identical prompts, each burst with one of its own."""
    chooser = random.Random(f"burst {seed}")
    every_s = BURST_REQUESTS * _BURST_TOKENS / tokens_per_s
    outputs = [_length(chooser, 100, 400) for _ in range(requests)]
    made = []
    for index, output_tokens in enumerate(outputs):
        number = index // BURST_REQUESTS
        turn = Turn((Span(number, _BURST_TOKENS),), output_tokens)
        made.append(Session(number * every_s, (turn,)))
    return made


def unique(requests: int, *, seed: int, tokens_per_s: float) -> list[Session]:
    """Return requests at random times (a Poisson process) whose prompts share nothing."""
    chooser = random.Random(f"unique {seed}")
    made = [
        Session(
            0.0,
            (Turn((Span(number, _length(chooser, 6_000, 60_000)),), _length(chooser, 200, 1_000)),),
        )
        for number in range(requests)
    ]
    rate = requests * tokens_per_s / sum(each.prompt_tokens for each in made)
    starts_s = itertools.accumulate(chooser.expovariate(rate) for _ in made)
    return with_starts(made, list(starts_s))


GENERATORS: Final[dict[str, Callable[..., list[Session]]]] = {
    "rounds": rounds,
    "agents": agents,
    "burst": burst,
    "unique": unique,
}


def _sessions(requests: int, turns: int, make: Callable[[int, int], Session]) -> Iterator[Session]:
    """Make sessions of ``turns`` turns (the last of the rest) with so many requests in all."""
    for index, first in enumerate(range(0, requests, turns)):
        yield make(index, min(turns, requests - first))


def _spread_evenly(
    sessions: Iterator[Session], chooser: random.Random, tokens_per_s: float
) -> list[Session]:
    made = list(sessions)
    return spread(made, [chooser.random() for _ in made], tokens_per_s=tokens_per_s)


def _length(chooser: random.Random, median: int, most: int) -> int:
    """Return a length around a median, with a long tail that is cut at ``most``."""
    return max(16, min(most, round(median * chooser.lognormvariate(0.0, _LENGTH_SPREAD))))
