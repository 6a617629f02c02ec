"""Coding agents from a file in AIPerf's session form.

One JSON object a turn, in the session's order: ``session_id``; ``input_length``
(tokens) and ``hash_ids`` (one for each block of 512 of them) of what the turn
adds, the first turn the whole opening prompt; ``output_length``; from the
second turn on ``delay``, in ms between the end of the answer before and this
turn. Other fields are not read.
"""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.ttft import BenchError
from bench.workloads.generated import poisson
from bench.workloads.session import Session, Span, Turn
from bench.workloads.trace import block_spans, json_lines

_FIELDS: Final = '"session_id", "input_length", "output_length" and "hash_ids"'


def read_agents(path: Path) -> list[Session]:
    """Return a file's sessions, all starting at 0.

    Raises `BenchError` for a file that cannot be read or a line that is no turn.
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
