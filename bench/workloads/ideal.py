"""The ideal run: no queue, and one infinite cache for all requests. Pure.

It gives the load that a workload offers (when each request is due, and how many
tokens an infinite cache leaves to compute), and the bound that no fleet can pass.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.workloads.session import Session, Span
from replay.record import Record
from simulator.model.replica_machine import Rates, Shape


@dataclass(slots=True)
class _Text:
    """What has been seen after one text, itself included."""

    longest: dict[int, int] = field(default_factory=dict)
    """By number: how many tokens of that text were seen here."""
    after: dict[tuple[int, int], "_Text"] = field(default_factory=dict)


class SeenPrompts:
    """All prompts ever sent."""

    def __init__(self) -> None:
        self._root = _Text()

    def add(self, spans: Iterable[Span]) -> int:
        """Add a prompt; return how many of its leading tokens were there before."""
        node, matched, matches = self._root, 0, True
        for span in spans:
            had = node.longest.get(span.number, 0)
            if matches:
                matched += min(had, span.tokens)
                matches = had >= span.tokens
            node.longest[span.number] = max(had, span.tokens)
            node = node.after.setdefault((span.number, span.tokens), _Text())
        return matched


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealTurn:
    """One request of the ideal run; seconds of one replica."""

    offset_s: float
    """Since its session's start, when it is due."""
    prompt_tokens: int
    matched_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the infinite cache leaves to compute."""
        return self.prompt_tokens - self.matched_tokens


class IdealRun:
    """Answers sessions in order of their starts.

    Which session comes first decides what is found; when they come does not.
    A prompt is found as far as it was sent before, even if it is still being computed.
    Only first prompts can be found in other sessions: later ones begin with an
    answer's own text.
    """

    def __init__(self, rates: Rates, shape: Shape) -> None:
        self._rates = rates
        self._shape = shape
        self._seen = SeenPrompts()

    def answer(self, session: Session) -> list[IdealTurn]:
        """Return a session's requests."""
        offset_s, prompt_tokens = 0.0, 0
        known_tokens = self._seen.add(session.turns[0].spans)
        turns: list[IdealTurn] = []
        for turn in session.turns:
            if turns:
                offset_s += turns[-1].total_s + turn.pause_s
                known_tokens = prompt_tokens = prompt_tokens + turns[-1].output_tokens
            prompt_tokens += turn.tokens
            matched_tokens = self._usable(known_tokens, prompt_tokens)
            ttft_s = self._ttft_s(prompt_tokens - matched_tokens, matched_tokens)
            context_tokens = prompt_tokens + turn.output_tokens // 2
            decodes_s = (turn.output_tokens - 1) * self._rates.decode_s(1, context_tokens)
            turns.append(
                IdealTurn(
                    offset_s=offset_s,
                    prompt_tokens=prompt_tokens,
                    matched_tokens=matched_tokens,
                    output_tokens=turn.output_tokens,
                    ttft_s=ttft_s,
                    total_s=ttft_s + decodes_s,
                )
            )
        return turns

    def _usable(self, matched: int, tokens: int) -> int:
        """Return the matched tokens in whole blocks; the last token is always computed."""
        block_tokens = self._shape.block_tokens
        return min(matched, tokens - 1) // block_tokens * block_tokens

    def _ttft_s(self, computed: int, matched: int) -> float:
        steps = math.ceil(computed / self._shape.max_batched_tokens)
        return steps * self._rates.step_s + self._rates.prefill_s(computed, matched)


NO_QUEUE: Final = "no-queue"
"""The bound's name: each request is alone on a replica that holds every prefix sent before."""


def no_queue(sessions: Sequence[Session], rates: Rates, shape: Shape) -> list[Record]:
    """Return the record of each request, as a replica without a queue would answer it."""
    first_numbers = _first_numbers(sessions)
    run = IdealRun(rates, shape)
    records = []
    for index in sorted(range(len(sessions)), key=lambda one: sessions[one].start_s):
        for turn_index, turn in enumerate(run.answer(sessions[index])):
            number = first_numbers[index] + turn_index
            records.append(_record(number, sessions[index], turn_index, turn))
    return sorted(records, key=lambda each: each.number)


def _record(number: int, session: Session, turn_index: int, turn: IdealTurn) -> Record:
    due_s = session.start_s + turn.offset_s
    return Record(
        number=number,
        session=session.name,
        turn=turn_index,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        streamed=session.turns[turn_index].streamed,
        due_s=due_s,
        sent_s=due_s,
        ttft_s=turn.ttft_s,
        total_s=turn.total_s,
        instance_id=NO_QUEUE,
        cached_tokens={"gpu": turn.matched_tokens, "cpu": 0, "disk": 0},
        arrived_s=due_s,
        first_token_s=due_s + turn.ttft_s,
        finished_s=due_s + turn.total_s,
    )


def _first_numbers(sessions: Sequence[Session]) -> list[int]:
    numbers, number = [], 0
    for session in sessions:
        numbers.append(number)
        number += len(session.turns)
    return numbers
