"""Small fleets in model time, with round numbers, and what is sent to them."""

import functools
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Final

from bench.discrete.conversation import Conversation
from bench.workloads.session import Session, Span, Turn
from replay import clock
from replay.record import Record
from replay.replica import ModelReplica
from replay.requests import ModelPrompt, Sent
from router.index.prompt_keys import KvTier
from simulator.model.replica_machine import Machine, Rates, Shape

BLOCK: Final = 10
CHUNK: Final = 20

_RATES: Final = {
    "prefill_tokens_per_s": 1_000.0,
    "step_s": 0.01,
    "decode_s_per_sequence": 0.01,
    "load_tokens_per_s": 10_000.0,
    "store_tokens_per_s": 1e9,
    "disk_tokens_per_s": 500.0,
    "disk_write_tokens_per_s": 1_000.0,
    "peer_tokens_per_s": 200.0,
    "receive_tokens_per_s": 400.0,
}
_SHAPE: Final = {
    "gpu_tokens": 1_000,
    "block_tokens": BLOCK,
    "chunk_tokens": CHUNK,
    "max_batched_tokens": 100,
    "max_sequences": 8,
}
_SIZES: Final = {"cpu_tokens": 1_000, "disk_tokens": 10_000}


def machine(**changes: Any) -> Machine:
    """A prefilled token takes 1 ms, a step 10, a decoding sequence 10, a chunk from disk 40.

    Stores take no time; a copy leaves a replica at 200 tokens a second.
    """
    given = [{name: changes.pop(name, value) for name, value in each.items()} for each in _PARTS]
    assert not changes, f"no machine has {changes}"
    rates, shape, sizes = given
    return Machine(rates=Rates(**rates), shape=Shape(**shape), **sizes)


_PARTS: Final[Sequence[dict[str, Any]]] = (_RATES, _SHAPE, _SIZES)


def in_model_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop whose time is the model's, from 0 s on."""

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        clock.run(test(*given, **named))

    return run


def prompt(tokens: int, *, text: int = 1, answer: int = 1, said: int = -1) -> ModelPrompt:
    """The first tokens of a text; ``said`` numbers the answer's."""
    return Conversation(BLOCK).turn([Span(text, tokens)], Span(said, answer))


def sent(
    given: ModelPrompt,
    *,
    answer: int = 1,
    session: str | None = None,
    streamed: bool = True,
    now_s: float = 0.0,
    number: int = 0,
) -> Sent:
    """What a client sends, and the record of it."""
    record = Record(
        number=number,
        session=session,
        turn=0,
        prompt_tokens=given.token_count,
        due_s=now_s,
        sent_s=now_s,
        streamed=streamed,
        output_tokens=answer,
    )
    return Sent(
        prompt=given, session=session, streamed=streamed, output_tokens=answer, record=record
    )


def talk(
    *turns: tuple[int, int],
    start_s: float = 0.0,
    pause_s: float = 0.0,
    name: str | None = None,
    texts: "count[int] | None" = None,
    shared: Sequence[Span] = (),
    streamed: bool = True,
) -> Session:
    """A session of turns, each of a text of its own: tokens said and tokens answered."""
    numbers = texts or count(1)
    made = [
        Turn(
            (*(shared if at == 0 else ()), Span(next(numbers), tokens)),
            answer,
            pause_s,
            streamed,
        )
        for at, (tokens, answer) in enumerate(turns)
    ]
    return Session(start_s, tuple(made), name)


class Told:
    """What replicas tell: the blocks and chunks that each tier holds, as last heard."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, KvTier], set[int]] = {}
        self.cleared_replicas: list[int] = []

    def of(self, replica: int, tier: KvTier) -> set[int]:
        return self.held.setdefault((replica, tier), set())

    def stored(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        self.of(replica, tier).update(keys)

    def removed(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        self.of(replica, tier).difference_update(keys)

    def cleared(self, replica: int) -> None:
        self.cleared_replicas.append(replica)
        self.of(replica, KvTier.GPU).clear()


class Heard:
    """When a request's first token came, to its caller."""

    def __init__(self) -> None:
        self.first_s: list[float] = []

    def __call__(self, now_s: float) -> None:
        self.first_s.append(now_s)


async def served(replica: ModelReplica, given: ModelPrompt, answer: int = 1) -> float:
    """Have a prompt answered; return the seconds to its first token."""
    heard = Heard()
    serving = replica.submit(given, answer, heard)
    await serving.done
    (first_s,) = heard.first_s
    return first_s - serving.request.arrived_s
