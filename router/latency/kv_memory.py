"""KV memory of a replica's GPU: what a prompt takes of it, and when how much is free.

Answers are of unknown length: n that run are taken to end one after another, the k-th next
``answer_s / (n - k + 1)`` after the one before it, as n exponential times of mean
``answer_s`` do.

Pure: no clock, no I/O.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final


@dataclass(frozen=True, slots=True)
class KvNeed:
    """The KV memory of a prompt: keys of equal parts of it, of which requests share equal ones."""

    keys: Sequence[int] = ()
    tokens_per_key: int = 1
    tokens: int = 0
    """Of the whole prompt."""


NO_KV: Final = KvNeed()


class KvMemory:
    """KV memory: how much is free, and when how much more will be."""

    def __init__(
        self, capacity: float, answer_s: float, held: Collection[float], now_s: float
    ) -> None:
        self.free_tokens = capacity - sum(held)
        self._answer_s = answer_s
        self._held = held
        self._now_s = now_s
        self._later: list[tuple[float, float]] = []
        """What `give_back_at` noted."""
        self._heap: list[tuple[float, float]] | None = None
        """All releases, once they are asked for: mostly there is memory, and hundreds decode."""

    def take(self, tokens: float, from_s: float) -> float:
        """Take memory as soon as there is some; return when. What never fits waits for all."""
        while self.free_tokens < tokens and (releases := self._releases()):
            release_s, released = heapq.heappop(releases)
            from_s = max(from_s, release_s)
            self.free_tokens += released
        self.free_tokens -= tokens
        return from_s

    def give_back_at(self, at_s: float, tokens: float) -> None:
        """Note when a request's answer will end."""
        if self._heap is None:
            self._later.append((at_s, tokens))
        else:
            heapq.heappush(self._heap, (at_s, tokens))

    def in_order(self) -> list[tuple[float, float]]:
        """Return when how much more will be free, as it stands now."""
        releases = self._releases()
        releases.sort()  # in order, a heap is one still
        return releases

    def copy(self) -> "KvMemory":
        """Return a copy, to be kept as it stands now."""
        other = KvMemory(0.0, self._answer_s, self._held, self._now_s)
        other.free_tokens, other._later = self.free_tokens, self._later.copy()
        other._heap = None if self._heap is None else self._heap.copy()
        return other

    def _releases(self) -> list[tuple[float, float]]:
        if self._heap is None:
            at_s, heap = self._now_s, self._later
            for left, tokens in zip(range(len(self._held), 0, -1), self._held, strict=True):
                at_s += self._answer_s / left
                heap.append((at_s, tokens))
            heapq.heapify(heap)
            self._heap = heap
        return self._heap


BOUNDLESS: Final = KvMemory(inf, 0.0, (), 0.0)
"""Where nothing is known to bind. It is only read: nothing is taken of it or given back."""
