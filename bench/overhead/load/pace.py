"""Sending many requests: as fast as some connections can, or each when it is due."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from bench.overhead.load.connection import BadAnswerError, Timing
from bench.overhead.prompts import Sequences

Ask = Callable[[bytes], Awaitable[Timing]]


@dataclass(kw_only=True)
class Sent:
    """What became of the requests so far."""

    timings: list[Timing] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """Of requests with a time: how much later each was taken up."""
    errors: int = 0
    first_error: str | None = None
    in_flight: int = 0

    async def ask(self, ask: Ask, body: bytes) -> None:
        """Send one, and note how it went."""
        self.in_flight += 1
        try:
            self.timings.append(await ask(body))
        except (BadAnswerError, OSError, TimeoutError) as error:
            self.errors += 1
            self.first_error = self.first_error or f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1


async def flood(ask: Ask, sequences: Sequences, connections: int, sent: Sent) -> None:
    """Send everything, with so many requests under way at once.

    The sequences are shared among the connections; inside one the next request
    follows the answer.
    """
    left = iter(sequences)

    async def work() -> None:
        for sequence in left:
            for body in sequence:
                await sent.ask(ask, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(work())


async def paced(
    ask: Ask,
    sequences: Sequences,
    rate_per_s: float,
    sent: Sent,
    all_sent: Callable[[], None],
) -> None:
    """Send each request when it is due, or when the answer before it has come, if later.

    Sequences take turns, so that a conversation's requests are far apart.
    ``all_sent`` is called when none is left to be sent.
    """
    began_s = time.perf_counter()
    before: dict[int, asyncio.Task[None]] = {}

    async def after(previous: asyncio.Task[None] | None, body: bytes) -> None:
        if previous is not None:
            await previous
        await sent.ask(ask, body)

    async with asyncio.TaskGroup() as group:
        for number, (name, body) in enumerate(in_turns(sequences)):
            due_s = began_s + number / rate_per_s
            await asyncio.sleep(due_s - time.perf_counter())
            sent.late_s.append(time.perf_counter() - due_s)
            before[name] = group.create_task(after(before.get(name), body))
        # The last one is sent in the next turn of the loop.
        await asyncio.sleep(0)
        all_sent()


def in_turns(sequences: Sequences) -> Iterator[tuple[int, bytes]]:
    """Yield the first of every sequence, with the sequence's number, then the second, and so on."""
    for turn in range(max(map(len, sequences), default=0)):
        for name, sequence in enumerate(sequences):
            if turn < len(sequence):
                yield name, sequence[turn]
