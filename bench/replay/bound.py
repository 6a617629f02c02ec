"""The bound that no fleet can pass: one replica with an infinite cache and no queue.

Every request is alone on it, and finds on the GPU whatever prefix was sent
before, be it still being computed. Nothing runs: it follows from the workload
and the rates.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.record import Record
from bench.simulator.model.rates import Rates, Shape
from bench.workloads.session import Session, Span

REPLICA = "no-queue"


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


def no_queue(sessions: Sequence[Session], rates: Rates, shape: Shape) -> list[Record]:
    """Return each request's record as that replica would answer it."""
    seen = SeenPrompts()
    first_numbers = _first_numbers(sessions)
    due = [(session.start_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(due)
    prompts: dict[int, list[Span]] = {}
    records = []
    while due:
        due_s, index, turn_index = heapq.heappop(due)
        session = sessions[index]
        turn = session.turns[turn_index]
        prompt = prompts.setdefault(index, [])
        prompt += turn.spans
        tokens = sum(span.tokens for span in prompt)
        matched = _usable(seen.add(prompt), tokens, shape)
        ttft_s = _ttft_s(tokens - matched, matched, rates, shape)
        total_s = ttft_s + (turn.output_tokens - 1) * rates.decode_s(1)
        records.append(
            Record(
                number=first_numbers[index] + turn_index,
                session=session.name,
                turn=turn_index,
                prompt_tokens=tokens,
                due_s=due_s,
                sent_s=due_s,
                ttft_s=ttft_s,
                total_s=total_s,
                instance_id=REPLICA,
                cached_tokens={"gpu": matched, "cpu": 0, "disk": 0},
                arrived_s=due_s,
                first_token_s=due_s + ttft_s,
                finished_s=due_s + total_s,
            )
        )
        if turn_index + 1 < len(session.turns):
            # An answer is a text of its own; its KV is there when it has been given.
            prompt.append(Span(-records[-1].number - 1, turn.output_tokens))
            seen.add(prompt)
            pause_s = session.turns[turn_index + 1].pause_s
            heapq.heappush(due, (due_s + total_s + pause_s, index, turn_index + 1))
        else:
            del prompts[index]
    return sorted(records, key=lambda each: each.number)


def _first_numbers(sessions: Sequence[Session]) -> list[int]:
    numbers, number = [], 0
    for session in sessions:
        numbers.append(number)
        number += len(session.turns)
    return numbers


def _usable(matched: int, tokens: int, shape: Shape) -> int:
    """Return the matched tokens in whole blocks; the last token is always computed."""
    return min(matched, tokens - 1) // shape.block_tokens * shape.block_tokens


def _ttft_s(computed: int, matched: int, rates: Rates, shape: Shape) -> float:
    steps = math.ceil(computed / shape.max_batched_tokens)
    return steps * rates.step_s + rates.prefill_s(computed, matched)
