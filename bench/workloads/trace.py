"""Workloads from files: Mooncake's traces, and coding agents in AIPerf's session form."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench.ttft import BenchError
from bench.workloads.generated import poisson
from bench.workloads.session import BLOCK_TOKENS, Session, Span, Turn, with_starts


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


_FIELDS: Final = '"session_id", "input_length", "output_length" and "hash_ids"'


def read_agents(path: Path) -> list[Session]:
    """Return a file's sessions, all starting at 0.

    Raises `BenchError` for a file that cannot be read or a line that is not a turn.
    """
    turns: dict[str, list[Turn]] = {}
    for where, line in json_lines(path):
        name, turn = _turn(line, where, turns)
        turns.setdefault(name, []).append(turn)
    if not turns:
        raise BenchError(f"--trace: {path} has no sessions: give a file with one turn a line")
    return [Session(0.0, tuple(each), name) for name, each in turns.items()]


def drawn_agents(sessions: Sequence[Session], seed: int) -> Iterator[Session]:
    """Draw from a file's sessions with replacement, endlessly; starts in mean gaps.

    Texts that one session of the file has alone are new with each draw; texts
    that several have stay the same for all draws.
    """
    chooser = random.Random(f"drawn agents {seed}")
    used_by = Counter(number for each in sessions for number in _numbers(each))
    own = [sorted(n for n in _numbers(each) if used_by[n] == 1) for each in sessions]
    numbers = itertools.count(max(used_by) + 1)

    def drawn(index: int) -> Session:
        chosen = chooser.randrange(len(sessions))
        fresh = dict(zip(own[chosen], numbers, strict=False))
        return Session(0.0, _renumbered(sessions[chosen].turns, fresh), f"agent-{index}")

    return poisson(map(drawn, itertools.count()), chooser)


def _numbers(session: Session) -> set[int]:
    return {span.number for turn in session.turns for span in turn.spans}


def _renumbered(turns: tuple[Turn, ...], fresh: dict[int, int]) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            tuple(
                Span(fresh[span.number], span.tokens) if span.number in fresh else span
                for span in turn.spans
            ),
            turn.output_tokens,
            turn.pause_s,
        )
        for turn in turns
    )


def _turn(line: str, where: str, before: dict[str, list[Turn]]) -> tuple[str, Turn]:
    try:
        fields = json.loads(line)
        name, tokens, ids = fields["session_id"], fields["input_length"], fields["hash_ids"]
        output_tokens = fields["output_length"]
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{where}: write an object with {_FIELDS}") from None
    if not isinstance(name, str) or not name:
        raise BenchError(f"{where}: session_id is {name!r}; make it a text that is not empty")
    if type(output_tokens) is not int or output_tokens < 1:
        raise BenchError(
            f"{where}: output_length is {output_tokens!r}; make it a whole number of at least 1"
        )
    pause_s = _pause_s(fields.get("delay"), where) if name in before else 0.0
    return name, Turn(block_spans(tokens, ids, where), output_tokens, pause_s)


def _pause_s(delay_ms: Any, where: str) -> float:
    is_number = isinstance(delay_ms, int | float) and not isinstance(delay_ms, bool)
    if not is_number or not (math.isfinite(delay_ms) and delay_ms >= 0):
        raise BenchError(
            f"{where}: delay is {delay_ms!r}; a session's later turns need the ms since the "
            "answer before, at least 0"
        )
    return float(delay_ms) / 1000.0
