"""The bound that no fleet can pass: one replica with an infinite cache and no queue.

Every request is alone on it, and finds on the GPU whatever prefix was sent
before, be it still being computed. Nothing runs: it follows from the workload
and the rates.
"""

from collections.abc import Sequence
from typing import Final

from bench.record import Record
from bench.workloads.ideal import IdealRun, IdealTurn
from bench.workloads.session import Session
from simulator.model.rates import Rates, Shape

REPLICA: Final = "no-queue"


def no_queue(sessions: Sequence[Session], rates: Rates, shape: Shape) -> list[Record]:
    """Return each request's record as that replica would answer it."""
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
        instance_id=REPLICA,
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
