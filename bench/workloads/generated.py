"""Generated workloads, each from a seed: endless, with one session after the other.

- rounds: users who ask about a document of their own, round after round, all behind one
  system prompt; the next question comes after a time to think.
- burst: the same cold prompt a hundred times at once, repeatedly.
- unique: no two prompts have anything in common; no cache can help.
- agents: coding agents in the form and with the statistics of NVIDIA's AIPerf. All sessions
  share one prompt of tools and system text, those of one group a second one; the task is each
  session's own. The context grows by what a tool or a person says, until it is full or the task
  is done. Constants were fitted to the sessions that
  ``aiperf synthesize agentic-code --max-isl 100000`` makes: first prompt 62k tokens on average,
  added by a turn 3.0k (median 1.8k), answers 490 (median 300), pauses 5 s (median 1.1 s,
  p90 13.6 s), 8 turns.
- mixture: two of three sessions are chats, the rest agents and documents in equal numbers. A
  third of each kind asks for its answers whole, not as a stream. Answers are 1 to 2,000 tokens.

The starts of an endless workload are mean gaps between sessions, not seconds:
`bench.workloads.pacing` turns them into seconds for a load.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from bench.workloads.session import BLOCK_TOKENS, Session, Span, Turn

_GOES_ON: Final = 0.37
"""Chance that a request continues a chat."""
_REQUESTS_BETWEEN: Final = 420
"""Requests that come before a chat continues, median."""
_KEPT: Final = 20_000
"""Requests after which none continues a chat."""
_MOST_BLOCKS: Final = 240


def chats(seed: int) -> Iterator[Session]:
    """Return requests, endlessly; starts are in mean gaps between them."""
    chooser = random.Random(f"chats {seed}")
    return poisson(_requests(chooser), chooser)


def _requests(chooser: random.Random) -> Iterator[Session]:
    system = Span(0, BLOCK_TOKENS)
    numbers = itertools.count(1)
    asked: deque[tuple[Span, ...]] = deque(maxlen=_KEPT)
    while True:
        before = _earlier(chooser, asked) or (system,)
        median = 1_150 if len(before) > 1 else 4_300
        added = length(chooser, median, 123_000, sigma=1.3)
        spans = (*before, *_blocks(added, numbers))[:_MOST_BLOCKS]
        asked.append(tuple(each for each in spans if each.tokens == BLOCK_TOKENS))
        yield Session(0.0, (Turn(spans, length(chooser, 250, 2_000, least=1)),))


def _earlier(chooser: random.Random, asked: deque[tuple[Span, ...]]) -> tuple[Span, ...]:
    """Return the full blocks of an earlier prompt; nothing where a new chat begins."""
    ago = length(chooser, _REQUESTS_BETWEEN, _KEPT, least=1, sigma=1.05)
    goes_on = chooser.random() < _GOES_ON
    return asked[-ago] if goes_on and ago <= len(asked) else ()


def _blocks(tokens: int, numbers: Iterator[int]) -> Iterator[Span]:
    for first in range(0, tokens, BLOCK_TOKENS):
        yield Span(next(numbers), min(BLOCK_TOKENS, tokens - first))


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


_KINDS: Final = ("chat", "chat", "chat", "chat", "agent", "document")
_MOST_ANSWER_TOKENS: Final = 2_000
_MIXTURE_SYSTEM_TOKENS: Final = 1_000
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
    system = Span(next(numbers), _MIXTURE_SYSTEM_TOKENS)
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


BURST_REQUESTS: Final = 100
"""Identical prompts that come at once."""

_SYSTEM_TOKENS: Final = 1_500
_ROUNDS: Final = 8
_THINK_S: Final = 15.0
_BURST_TOKENS: Final = 32_000
_LENGTH_SPREAD: Final = 0.8
"""Sigma of the (lognormal) lengths."""


def rounds(seed: int) -> Iterator[Session]:
    """Return users with `_ROUNDS` questions each."""
    chooser = random.Random(f"rounds {seed}")
    numbers = itertools.count(1)
    return poisson((_user(chooser, numbers, index) for index in itertools.count()), chooser)


def _user(chooser: random.Random, numbers: Iterator[int], index: int) -> Session:
    document = (Span(0, _SYSTEM_TOKENS), Span(next(numbers), length(chooser, 12_000, 64_000)))
    turns = tuple(
        Turn(
            (*(document if turn == 0 else ()), Span(next(numbers), length(chooser, 150, 2_000))),
            length(chooser, 100, 1_000),
            chooser.expovariate(1 / _THINK_S),
        )
        for turn in range(_ROUNDS)
    )
    return Session(0.0, turns, f"user-{index}")


def unique(seed: int) -> Iterator[Session]:
    """Return requests whose prompts share nothing."""
    chooser = random.Random(f"unique {seed}")

    def request(number: int) -> Session:
        spans = (Span(number, length(chooser, 6_000, 60_000)),)
        return Session(0.0, (Turn(spans, length(chooser, 200, 1_000)),))

    return poisson(map(request, itertools.count()), chooser)


def burst(seed: int) -> Iterator[Session]:
    """Return bursts of `BURST_REQUESTS` identical prompts, each burst with one of its own.

    The prompts are long and the answers short: what an infinite cache leaves of
    a burst is one prefill, and a hundred answers must not weigh more than that.
    """
    chooser = random.Random(f"burst {seed}")
    start = 0.0
    for number in itertools.count():
        # A mean gap lies between two sessions, so a hundred of them between two bursts.
        start += chooser.expovariate(1 / BURST_REQUESTS)
        for _ in range(BURST_REQUESTS):
            yield Session(start, (Turn((Span(number, _BURST_TOKENS),), length(chooser, 20, 100)),))


def poisson(sessions: Iterable[Session], chooser: random.Random) -> Iterator[Session]:
    """Start sessions at random, independently of each other: one in a mean gap on average."""
    start = 0.0
    for session in sessions:
        start += chooser.expovariate(1.0)
        yield replace(session, start_s=start)


def length(
    chooser: random.Random,
    median: float,
    most: int,
    *,
    least: int = 16,
    sigma: float = _LENGTH_SPREAD,
) -> int:
    """Return a length in tokens around a median, with a long tail that is cut at ``most``."""
    return max(least, min(most, round(chooser.lognormvariate(math.log(median), sigma))))
