"""The cases: a prompt's size, an answer's form and the pace, and the bodies of their requests.

Bodies are made before anything is measured. Texts are lines of the standard library's source,
drawn again for each prompt: real text to a tokenizer, and no two prompts begin alike.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from bench.replica.text import library_files

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
    """Length of the last turn's text; it is ASCII, so also its bytes."""
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
    """Events of an answer."""
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
    """Return the case in which this many slow streams are open at once.

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


MODEL: Final = "small"
MODEL_DIRECTORY: Final = Path.home() / ".cache" / "warmroute-overhead" / "model"
PATH: Final = "/v1/chat/completions"

Sequences = list[list[bytes]]
"""Bodies in the order in which they are sent; a sequence's next one follows the answer."""

_SHORTEST_LINE: Final = 8
_ANSWER_SHARE: Final = 0.25
"""Of what a conversation grows by in a turn."""


def library_lines() -> list[str]:
    """Return ASCII lines with something in them."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in library_files())
    lines = (line for line in text.splitlines() if line.isascii())
    return [line for line in lines if len(line.strip()) >= _SHORTEST_LINE]


def sequences(case: Case, lines: Sequence[str], draw: random.Random) -> Sequences:
    """Return a case's bodies, none of which comes twice."""
    count = -(-case.requests // case.kind.turns)
    made = [list(_turns(case, lines, draw)) for _ in range(count)]
    made[-1] = made[-1][: case.requests - (count - 1) * case.kind.turns]
    return made


def _turns(case: Case, lines: Sequence[str], draw: random.Random) -> Iterator[bytes]:
    """Yield the bodies of one conversation; its answers differ from the real ones."""
    turn_chars = case.kind.chars // case.kind.turns
    answer_chars = round(_ANSWER_SHARE * turn_chars) if case.kind.turns > 1 else 0
    messages: list[dict[str, str]] = []
    for _ in range(case.kind.turns):
        question = _text(turn_chars - answer_chars, lines, draw)
        messages.append({"role": "user", "content": question})
        yield body(case, messages)
        messages.append({"role": "assistant", "content": _text(answer_chars, lines, draw)})


def _text(chars: int, lines: Sequence[str], draw: random.Random) -> str:
    drawn: list[str] = []
    missing = chars
    while missing > 0:
        drawn.append(draw.choice(lines) + "\n")
        missing -= len(drawn[-1])
    return "".join(drawn)[:chars]


def body(case: Case, messages: Sequence[dict[str, str]]) -> bytes:
    """Return a request's body, on one line."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": case.tokens}
    if case.answer != "whole":
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps({**fields, "messages": messages})


def write(path: Path, made: Sequences) -> None:
    """Write bodies, one a line, sequences parted by an empty line."""
    path.write_bytes(b"\n\n".join(b"\n".join(each) for each in made))


def read(path: Path) -> Sequences:
    """Read what `write` has written."""
    return [each.split(b"\n") for each in path.read_bytes().split(b"\n\n")]
