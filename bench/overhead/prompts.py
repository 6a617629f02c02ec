"""Bodies of requests, made before anything is measured; the client and the fake replica read them.

Texts are lines of the standard library's source, drawn anew for each prompt:
real text to a tokenizer, and no prompt begins as another does.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from bench.overhead.case import Case
from bench.replica.text import library_files

MODEL: Final = "small"
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
    """Yield the bodies of one conversation; its answers are not those that will be given."""
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
