"""Requests of a trace in the form of the Mooncake release.

One JSON object a line: ``timestamp`` (ms since the start), ``input_length``
and ``output_length`` (tokens), ``hash_ids`` (one for each block of 512 tokens
of the prompt; equal ids, equal blocks). The trace tells no sessions, and none
are invented: each request stands alone, at its time.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench.ttft import BenchError
from bench.workloads.session import Session, Span, Turn, prompt_tokens, with_starts

BLOCK_TOKENS: Final = 512


def read_trace(path: Path, *, limit: int | None = None) -> list[Session]:
    """Return the requests of a trace (the first ``limit``) at their times.

    Raises `BenchError` for a file that cannot be read or a line that is none.
    """
    sessions = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in islice(lines, limit):
                sessions.append(_request(line, f"--trace: {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--trace: {path}: {error}") from None
    if not sessions:
        raise BenchError(f"--trace: {path} has no requests")
    return sorted(sessions, key=lambda each: each.start_s)


def at_load(sessions: list[Session], *, tokens_per_s: float) -> list[Session]:
    """Scale the times so that the prompts' tokens come at this rate on average."""
    length_s = sessions[-1].start_s - sessions[0].start_s
    if length_s <= 0:
        raise BenchError("the trace's requests all come at once: give --time-scale, not --load")
    return scaled(sessions, prompt_tokens(sessions) / tokens_per_s / length_s)


def scaled(sessions: list[Session], factor: float) -> list[Session]:
    """Multiply all times by a factor (below 1: more load)."""
    return with_starts(sessions, [each.start_s * factor for each in sessions])


def _request(line: str, where: str) -> Session:
    try:
        fields = json.loads(line)
        start_s = float(fields["timestamp"]) / 1000.0
        tokens, ids = fields["input_length"], fields["hash_ids"]
        output_tokens = int(fields["output_length"])
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f'{where}: write an object with "timestamp", "input_length", "output_length" '
            'and "hash_ids"'
        ) from None
    spans = _spans(tokens, ids, where)
    return Session(start_s, (Turn(spans, max(1, output_tokens)),))


def _spans(tokens: Any, ids: Any, where: str) -> tuple[Span, ...]:
    numbers = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not numbers or type(tokens) is not int or not ids:
        raise BenchError(f"{where}: hash_ids are whole numbers, and input_length is one")
    last = tokens - BLOCK_TOKENS * (len(ids) - 1)
    if not 0 < last <= BLOCK_TOKENS:
        raise BenchError(
            f"{where}: {tokens} tokens do not make {len(ids)} blocks of {BLOCK_TOKENS}"
        )
    return (*(Span(each, BLOCK_TOKENS) for each in ids[:-1]), Span(ids[-1], last))
