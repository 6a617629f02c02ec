"""What is sent: a prompt's size, an answer's form, and the pace."""

from dataclasses import dataclass
from typing import Final, Literal

AnswerForm = Literal["whole", "piece", "slow"]
"""Not streamed; streamed and sent in one piece; streamed one event at a time."""

SHORT_TOKENS: Final = 16
"""Length of an answer that comes at once: a longer streamed one is slow, a token an event."""
EVENT_GAP_S: Final = 0.02
"""Between two events of a slow stream."""


@dataclass(frozen=True, kw_only=True)
class PromptKind:
    """Prompts of one size: never seen before, or the turns of conversations."""

    chars: int
    """Of the last turn's text; it is ASCII, so as many bytes."""
    turns: int = 1


PROMPT_KINDS: Final = {
    "1k": PromptKind(chars=1 << 10),
    "16k": PromptKind(chars=16 << 10),
    "64k": PromptKind(chars=64 << 10),
    "conversation": PromptKind(chars=64 << 10, turns=32),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """So many requests of one kind, at one pace."""

    prompt: str
    """One of `PROMPT_KINDS`."""
    answer: AnswerForm
    requests: int
    tokens: int = SHORT_TOKENS
    """Of an answer."""
    rate_per_s: float | None = None
    """Requests are sent at this rate; None: as fast as all connections can."""

    @property
    def name(self) -> str:
        """Return it as the command line and the report have it."""
        pace = "" if self.rate_per_s is None or self.answer == "slow" else "-paced"
        return f"{self.prompt}-{self.answer}{pace}"

    @property
    def kind(self) -> PromptKind:
        """Return its prompts' kind."""
        return PROMPT_KINDS[self.prompt]

    @property
    def holds_streams(self) -> bool:
        """Whether all its requests are under way at once, for memory to be seen."""
        return self.answer == "slow"


def slow(prompt: str, streams: int, events: int) -> Case:
    """Return the case in which so many slow streams are open at once.

    They begin one after the other, over a good third of the time that one takes.
    """
    rate_per_s = streams / (0.4 * events * EVENT_GAP_S)
    return Case(
        prompt=prompt, answer="slow", requests=streams, tokens=events, rate_per_s=rate_per_s
    )


def cases(streams: int, events: int) -> list[Case]:
    """Return every case, in the order in which they are measured.

    Slow streams come first: memory that earlier cases have freed would hide
    what they take.
    """
    return [
        slow("1k", streams, events),
        slow("conversation", streams, events),
        Case(prompt="1k", answer="whole", requests=800),
        Case(prompt="1k", answer="piece", requests=800),
        Case(prompt="16k", answer="whole", requests=160),
        Case(prompt="16k", answer="piece", requests=160),
        Case(prompt="64k", answer="whole", requests=96),
        Case(prompt="64k", answer="piece", requests=96),
        Case(prompt="conversation", answer="whole", requests=32 * 32),
        Case(prompt="conversation", answer="piece", requests=32 * 32),
        Case(prompt="1k", answer="piece", requests=150, rate_per_s=100),
        Case(prompt="16k", answer="piece", requests=40, rate_per_s=25),
        Case(prompt="64k", answer="piece", requests=15, rate_per_s=5),
        Case(prompt="conversation", answer="piece", requests=2 * 32, rate_per_s=40),
    ]


WARM_UP: Final = Case(prompt="16k", answer="piece", requests=32)
"""What each contender gets when it has just been started; nothing of it is reported."""

DEFAULT: Final = (
    "1k-slow",
    "1k-whole",
    "1k-piece",
    "16k-piece",
    "64k-piece",
    "conversation-piece",
    "1k-piece-paced",
    "64k-piece-paced",
    "conversation-piece-paced",
)
"""The cases of a run for which none are named."""
