"""The text and the token ids of spans, made when they are first needed.

A span's words come from a hash of the seed and its number, so that equal
numbers give equal text on every machine, and a shorter span is the beginning
of a longer one. Both forms are kept as the bytes that a request's body holds:
the simulator's words need no escaping in JSON.
"""

import array
import hashlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from bench.workloads.session import Span
from simulator.openai_prompts import NUM_WORDS, text_of

KEPT_SPANS: Final = 20_000
"""Spans whose bytes are kept in each form; the least recently used ones are dropped."""


class Texts:
    """Prompts of spans, as text or as token ids of the simulated model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = lru_cache(maxsize=KEPT_SPANS)(self._make_words)
        self._numbers = lru_cache(maxsize=KEPT_SPANS)(self._make_numbers)

    def token_ids(self, span: Span) -> list[int]:
        """Return a span's token ids."""
        digest = hashlib.shake_128(f"{self._seed}:{span.number}".encode()).digest(4 * span.tokens)
        numbers = array.array("I", digest)
        if sys.byteorder == "big":
            numbers.byteswap()
        return [number % NUM_WORDS for number in numbers]

    def text(self, spans: Iterable[Span]) -> bytes:
        """Return the text of spans, one after the other."""
        return b" ".join(map(self._words, spans))

    def numbers(self, spans: Iterable[Span]) -> bytes:
        """Return the token ids of spans, one after the other, as JSON's numbers."""
        return b",".join(map(self._numbers, spans))

    def _make_words(self, span: Span) -> bytes:
        return text_of(self.token_ids(span)).encode()

    def _make_numbers(self, span: Span) -> bytes:
        return as_numbers(self.token_ids(span))


def as_numbers(token_ids: Iterable[int]) -> bytes:
    """Return token ids as JSON's numbers, without the brackets."""
    return ",".join(map(str, token_ids)).encode()
