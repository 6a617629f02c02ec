"""A workload played to its end in model time, by one contender before a fleet of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from bench.discrete.bounds import SharedCache
from bench.discrete.conversation import Conversation
from bench.workloads.session import Session, Span
from replay import clock
from replay.record import Record
from replay.replica import Fault, ModelReplica, machine_of, run_faults
from replay.requests import Sent
from simulator.model.replica_machine import Machine

_AT_ONCE: Final = 1e15
TRIES: Final = 3
"""How often a client sends a request that a router refuses or cannot serve (429 and 503): as the
official OpenAI client does by default, and as long after it (``Retry-After`` of up to a minute,
else 0.5 s, then 1 s). The time to the first token counts from the first try."""
_SENT_AGAIN: Final = frozenset({429, 503})
_LONGEST_RETRY_AFTER_S: Final = 60.0
_FIRST_RETRY_S: Final = 0.5
NOISE: Final = 0.05
"""Standard deviation of the logarithm of a step's duration."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """A fleet of equal replicas, but for its faults."""

    replicas: int = 8
    machine: Machine = field(default_factory=Machine)
    seed: int = 1
    """Of noise and ties."""
    noise: float = NOISE
    faults: Sequence[Fault] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of every request, and what else was counted."""

    records: Sequence[Record]
    counts: Mapping[str, float]


class StoppableRouter(Protocol):
    """A contender's router; see `replay.requests.Router`."""

    async def answer(self, sent: Sent) -> None:
        """Have a request answered."""

    def counts(self) -> dict[str, float]:
        """Return what it counted."""

    async def stop(self) -> None:
        """End what runs in the background."""


MakeRouter = Callable[[Sequence[ModelReplica], int], StoppableRouter]
"""From a fleet and a seed to a router before it."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How a contender's fleet and router are made."""

    make: MakeRouter
    shares_cache: bool = False
    """Whether all replicas share one infinite cache, to load from which takes no time."""


def play_with(
    contender: Contender,
    sessions: Sequence[Session],
    options: FleetOptions,
    *,
    tries: int = TRIES,
) -> Run:
    """Play sessions through a contender; deterministic."""
    return clock.run(_play(contender, sessions, options, tries))


async def _play(
    contender: Contender, sessions: Sequence[Session], options: FleetOptions, tries: int
) -> Run:
    replicas = _replicas(contender, options)
    router = contender.make(replicas, options.seed)
    faults = asyncio.ensure_future(run_faults(replicas, options.faults))
    client = _Client(router.answer, options.machine.shape.block_tokens, tries)
    records = await client.run(sessions)
    faults.cancel()
    counts = {**router.counts(), **_counts(replicas)}
    await router.stop()
    return Run(records=records, counts=counts)


def _replicas(contender: Contender, options: FleetOptions) -> list[ModelReplica]:
    machine, shared = options.machine, None
    if contender.shares_cache:
        machine = replace(machine, rates=replace(machine.rates, load_tokens_per_s=_AT_ONCE))
        shared = SharedCache(machine.shape.chunk_tokens)
    return [
        ModelReplica(
            slot,
            machine_of(machine, slot, options.faults),
            seed=options.seed,
            noise=options.noise,
            shared=shared,
        )
        for slot in range(options.replicas)
    ]


class _Client:
    """Sends sessions: each turn after the answer to the one before, and a pause."""

    def __init__(
        self, answer: Callable[[Sent], Awaitable[None]], block_tokens: int, tries: int
    ) -> None:
        self._answer = answer
        self._block_tokens = block_tokens
        self._tries = tries
        self._loop = asyncio.get_running_loop()

    async def run(self, sessions: Sequence[Session]) -> list[Record]:
        """Send all of them; return the records in order of their numbers."""
        records: list[Record] = []
        number = 0
        tasks = []
        for session in sessions:
            tasks.append(self._loop.create_task(self._session(session, number, records)))
            number += len(session.turns)
        await asyncio.gather(*tasks)
        records.sort(key=lambda each: each.number)
        return records

    async def _session(self, session: Session, first: int, records: list[Record]) -> None:
        await asyncio.sleep(session.start_s - self._loop.time())
        conversation = Conversation(self._block_tokens)
        due_s = session.start_s
        for index, turn in enumerate(session.turns):
            number = first + index
            # An answer is a text of its own, the same from every replica.
            prompt = conversation.turn(turn.spans, Span(-number - 1, turn.output_tokens))
            record = Record(
                number=number,
                session=session.name,
                turn=index,
                prompt_tokens=prompt.token_count,
                due_s=due_s,
                sent_s=self._loop.time(),
                streamed=turn.streamed,
                output_tokens=turn.output_tokens,
            )
            records.append(record)
            await self._send(
                Sent(
                    prompt=prompt,
                    session=session.name,
                    streamed=turn.streamed,
                    output_tokens=turn.output_tokens,
                    record=record,
                )
            )
            if not record.ok:
                self._give_up(session, number + 1, index + 1, records)
            if not record.ok or index + 1 == len(session.turns):
                return
            due_s = self._loop.time() + session.turns[index + 1].pause_s
            await asyncio.sleep(session.turns[index + 1].pause_s)

    async def _send(self, sent: Sent) -> None:
        for retry in range(self._tries):
            await self._answer(sent)
            if sent.record.status not in _SENT_AGAIN or retry + 1 == self._tries:
                return
            pause_s = sent.retry_after_s
            if pause_s is None or pause_s > _LONGEST_RETRY_AFTER_S:
                pause_s = _FIRST_RETRY_S * 2**retry
            await asyncio.sleep(pause_s)

    def _give_up(
        self, session: Session, number: int, first_turn: int, records: list[Record]
    ) -> None:
        """Note the turns that are not sent, since one before them was not answered."""
        now_s = self._loop.time()
        for index, turn in enumerate(session.turns[first_turn:]):
            records.append(
                Record(
                    number=number + index,
                    session=session.name,
                    turn=first_turn + index,
                    prompt_tokens=0,
                    due_s=now_s,
                    sent_s=now_s,
                    streamed=turn.streamed,
                    output_tokens=turn.output_tokens,
                    error="not sent: the turn before was not answered",
                )
            )


def _counts(replicas: Sequence[ModelReplica]) -> dict[str, float]:
    stats = [each.engine.stats() for each in replicas]
    totals = [each.model.totals for each in replicas]
    return {
        "prefetch_unused_tokens": sum(each.prefetch_unused_bytes for each in stats),
        "promoted_tokens": sum(each.promoted_bytes for each in stats),
        "put_drops": sum(each.lower_tiers.put_drops for each in stats),
        "store_drops": sum(each.store_drops for each in stats),
        "prefilled_tokens": sum(each.prefilled for each in totals),
        "preemptions": sum(each.preempted for each in totals),
    }
