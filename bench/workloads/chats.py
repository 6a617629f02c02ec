"""A conversation trace that is made up: requests that say nothing of sessions, from a seed.

Some begin a new chat, the rest go on with one of which a request came a while
ago, be it the latest or not. Constants were fitted to the conversation trace
of the Mooncake release: prompts of 12k tokens on average, answers of 343, two
fifths of the prompts longer versions of earlier ones, of which the last block
is cut anew, and 37% of all blocks seen before.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Final

from bench.workloads.generated import length, poisson
from bench.workloads.session import Session, Span, Turn
from bench.workloads.trace import BLOCK_TOKENS

_GOES_ON: Final = 0.37
"""Chance that a request goes on with a chat."""
_REQUESTS_BETWEEN: Final = 420
"""Requests that come before a chat goes on, median."""
_KEPT: Final = 20_000
"""Requests after which none goes on with a chat any more."""
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
