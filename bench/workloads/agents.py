"""Coding agents that are made up: the form and the statistics of NVIDIA's AIPerf, from a seed.

All sessions share one prompt of tools and system text, those of one group a
second one; the task is each session's own. The context grows by what a tool or
a person says, until it is full or the task is done. Constants were fitted to
the sessions that ``aiperf synthesize agentic-code --max-isl 100000`` makes:
first prompt 62k tokens on average, added by a turn 3.0k (median 1.8k), answers
490 (median 300), pauses 5 s (median 1.1 s, p90 13.6 s), 8 turns.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Final

from bench.workloads.generated import length, poisson
from bench.workloads.session import Session, Span, Turn

_TOOLS_TOKENS: Final = 32_256
_GROUP_TOKENS: Final = 20_480
_GROUPS: Final = 50
_ZIPF: Final = 1.2
"""Exponent of the groups' sizes: a third of the sessions are of the largest one."""
_MOST_TOKENS: Final = 100_000
"""Where a context is full: the session ends before its prompt would be longer."""
_ENDS: Final = 0.05
"""Chance that a task is done after a turn."""


def agents(seed: int) -> Iterator[Session]:
    """Return agents' sessions, endlessly; starts are in mean gaps between them."""
    chooser = random.Random(f"agents {seed}")
    return poisson(agent_sessions(chooser, itertools.count()), chooser)


def agent_sessions(chooser: random.Random, numbers: Iterator[int]) -> Iterator[Session]:
    """Return agents' sessions without starts, their texts numbered from ``numbers``."""
    tools = Span(next(numbers), _TOOLS_TOKENS)
    groups = [Span(next(numbers), _GROUP_TOKENS) for _ in range(_GROUPS)]
    weights = list(itertools.accumulate((1 + rank) ** -_ZIPF for rank in range(_GROUPS)))
    for index in itertools.count():
        (group,) = chooser.choices(groups, cum_weights=weights)
        yield Session(0.0, _turns(chooser, numbers, (tools, group)), f"agent-{index}")


def _turns(
    chooser: random.Random, numbers: Iterator[int], shared: tuple[Span, ...]
) -> tuple[Turn, ...]:
    most = _MOST_TOKENS - sum(span.tokens for span in shared)
    task = Span(next(numbers), length(chooser, 4_900, most, least=360, sigma=1.3))
    turns = [Turn((*shared, task), _answer_tokens(chooser))]
    left = most - task.tokens
    while chooser.random() >= _ENDS:
        added = length(chooser, 1_900, _MOST_TOKENS, least=45, sigma=1.15)
        left -= turns[-1].output_tokens + added
        if left < 0:
            break
        span = Span(next(numbers), added)
        turns.append(Turn((span,), _answer_tokens(chooser), _pause_s(chooser)))
    return tuple(turns)


def _answer_tokens(chooser: random.Random) -> int:
    return length(chooser, 300, 10_000, least=30, sigma=1.0)


def _pause_s(chooser: random.Random) -> float:
    """Return a tool's seconds, or a person's, of which the tail is half a minute."""
    if chooser.random() < 0.73:
        return chooser.lognormvariate(-0.31, 0.87)
    return chooser.lognormvariate(2.33, 0.92)
