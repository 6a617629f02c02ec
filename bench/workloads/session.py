"""Sessions of turns: what clients send, and when. Times are model seconds.

A prompt is made of spans: equal numbers mean equal text, and a shorter span is the beginning of a
longer one with its number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

BLOCK_TOKENS: Final = 512
"""Size of the spans that traces and generated documents consist of."""


@dataclass(frozen=True, slots=True)
class Span:
    """The first ``tokens`` tokens of the text with this number; equal numbers, equal text."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session says next. Its prompt is all that was said and answered before, and this."""

    spans: tuple[Span, ...]
    output_tokens: int
    pause_s: float = 0.0
    """From the answer before to this turn; of the first turn nothing."""
    streamed: bool = True
    """Whether the client asks for its answer as a stream."""

    @property
    def tokens(self) -> int:
        """Tokens that this turn adds to the prompt."""
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other, each after the answer to the one before."""

    start_s: float
    turns: tuple[Turn, ...]
    name: str | None = None
    """Sent as the session's id; None where the workload knows of no sessions."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts together: what a fleet without a cache would prefill."""
        total = history = 0
        for turn in self.turns:
            history += turn.tokens
            total += history
            history += turn.output_tokens
        return total

    @property
    def longest_tokens(self) -> int:
        """Tokens of its last prompt and the answer to it."""
        return sum(turn.tokens + turn.output_tokens for turn in self.turns)

    @property
    def pauses_s(self) -> float:
        """All its pauses together."""
        return sum(turn.pause_s for turn in self.turns[1:])


def prompt_tokens(sessions: Iterable[Session]) -> int:
    """Return the tokens of all prompts."""
    return sum(session.prompt_tokens for session in sessions)


def requests(sessions: Iterable[Session]) -> int:
    """Return how many requests the sessions make."""
    return sum(len(session.turns) for session in sessions)


def with_starts(sessions: Sequence[Session], starts_s: Sequence[float]) -> list[Session]:
    """Return the sessions starting at other times, in order of their starts."""
    moved = [
        replace(each, start_s=start_s) for each, start_s in zip(sessions, starts_s, strict=True)
    ]
    return sorted(moved, key=lambda each: each.start_s)


def stretched(session: Session, factor: float) -> Session:
    """Return the session with all its pauses multiplied by a factor."""
    if factor == 1.0:
        return session
    turns = tuple(replace(each, pause_s=each.pause_s * factor) for each in session.turns)
    return replace(session, turns=turns)
