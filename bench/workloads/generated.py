"""Workloads that are made up, each from a seed: endless, with one session after the other.

- rounds: users who ask about a document of their own, round after round, all
  behind one system prompt; the next question comes after a time to think.
- burst: the same cold prompt a hundred times at once, again and again.
- unique: no two prompts have anything in common; no cache can help.

An endless workload has its starts in mean gaps between sessions, not in
seconds: `bench.workloads.pacing` turns them into seconds for a load.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from bench.workloads.session import Session, Span, Turn

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
