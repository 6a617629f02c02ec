"""Requests of a trace in the form of the Mooncake release.

One JSON object a line: ``timestamp`` (ms since the start), ``input_length``
and ``output_length`` (tokens), ``hash_ids`` (one for each block of 512 tokens
of the prompt; equal ids, equal blocks). The trace tells no sessions, and none
are invented: each request stands alone, at its time.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench.ttft import BenchError
from bench.workloads.session import Session, Span, Turn, with_starts

BLOCK_TOKENS: Final = 512


def read_trace(path: Path, *, limit: int | None = None) -> list[Session]:
    """Return the requests of a trace (the first ``limit``) at their times.

    Raises `BenchError` for a file that cannot be read or a line that is none.
    """
    sessions = [_request(line, where) for where, line in islice(json_lines(path), limit)]
    if not sessions:
        raise BenchError(f"--trace: {path} has no requests: give a file with one a line")
    return sorted(sessions, key=lambda each: each.start_s)


def scaled(sessions: list[Session], factor: float) -> list[Session]:
    """Multiply all times by a factor (below 1: more load)."""
    return with_starts(sessions, [each.start_s * factor for each in sessions])


def rotated(sessions: Sequence[Session], seed: int) -> Iterator[Session]:
    """Return a trace's requests from a place that the seed chooses, round and round.

    Starts are in mean gaps between requests. In each lap the texts are new: the
    trace never says that a prompt comes again after its end. Raises `BenchError`
    for a trace whose requests all come at once.
    """
    first_s, length_s = sessions[0].start_s, sessions[-1].start_s - sessions[0].start_s
    if length_s <= 0:
        raise BenchError("the trace's requests all come at once: give --time-scale, not --load")
    # The last request is followed by the first after a mean gap.
    per_s = (len(sessions) - 1) / length_s
    starts = [(each.start_s - first_s) * per_s for each in sessions]
    texts = 1 + max(span.number for each in sessions for span in each.turns[0].spans)
    offset = random.Random(f"conversation {seed}").randrange(len(sessions))
    for place in itertools.count(offset):
        lap, index = divmod(place, len(sessions))
        start = lap * len(sessions) + starts[index] - starts[offset]
        yield _moved(
            sessions[index], start, place_of_texts=texts * ((place - offset) // len(sessions))
        )


def json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not empty, each after where it stands.

    Raises `BenchError` for a file that cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"--trace: {path}, line {number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--trace: {path}: {error}") from None


def block_spans(tokens: Any, ids: Any, where: str) -> tuple[Span, ...]:
    """Return a line's blocks, the last of them cut; raise `BenchError` where they are none."""
    numbers = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not numbers or type(tokens) is not int or not ids:
        raise BenchError(f"{where}: hash_ids are whole numbers, and input_length is one")
    last = tokens - BLOCK_TOKENS * (len(ids) - 1)
    if not 0 < last <= BLOCK_TOKENS:
        raise BenchError(
            f"{where}: {tokens} tokens do not make {len(ids)} blocks of {BLOCK_TOKENS}"
        )
    return (*(Span(each, BLOCK_TOKENS) for each in ids[:-1]), Span(ids[-1], last))


def _moved(session: Session, start: float, *, place_of_texts: int) -> Session:
    """Return a request at another time, its texts numbered from another place on."""
    if not place_of_texts:
        return replace(session, start_s=start)
    turn = session.turns[0]
    spans = tuple(Span(place_of_texts + span.number, span.tokens) for span in turn.spans)
    return replace(session, start_s=start, turns=(replace(turn, spans=spans),))


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
    return Session(start_s, (Turn(block_spans(tokens, ids, where), max(1, output_tokens)),))
