"""Plays recorded requests before a fleet in simulated time, and counts what came of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from replay import clock
from replay.our_router import OurRouter, Settings
from replay.record import Record
from replay.recorded import RecordedRequest, model_prompt
from replay.replica import ModelReplica
from replay.requests import Sent
from router.fleet.cost_model import Quantiles
from simulator.model.replica_machine import Machine

_WARM_SHARE = 0.1
"""This share of the requests, the first ones, is left out of all figures: caches are cold."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of the requests of a log, without the first tenth. Times in seconds."""

    requests: int
    answered: int
    ttft: Quantiles | None
    """Of streamed answers."""
    tpot: Quantiles | None
    """Time per output token, of streamed answers."""
    hit_share: float | None
    """Cached tokens of the answered prompts, as a share of all their tokens."""


def recorded_figures(requests: Sequence[RecordedRequest]) -> Figures:
    """Return what the log says."""
    counted = requests[_warm(requests) :]
    answered = [each for each in counted if each.is_ok]
    streamed = [each for each in answered if each.streamed]
    told = [each for each in answered if each.cached_tokens is not None]
    return Figures(
        requests=len(counted),
        answered=len(answered),
        ttft=_quantiles([each.ttft_s for each in streamed]),
        tpot=_quantiles([each.tpot_s for each in streamed]),
        hit_share=_share(
            sum(each.cached_tokens or 0 for each in told), sum(each.prompt_tokens for each in told)
        ),
    )


@dataclass(kw_only=True)
class Player:
    """A fleet of equal replicas, which begins each `play` with empty caches."""

    machine: Machine
    replicas: int
    settings: Settings = field(default_factory=Settings)
    seed: int = 1

    def play(self, requests: Sequence[RecordedRequest]) -> Figures:
        """Play requests; return what came of them. The same seed gives the same figures.

        The next request of a session comes as long after the answer to the one before it as in the
        log, or after its beginning if it did not wait for the answer. All others come at their
        recorded times.
        """
        return clock.run(self._play(requests))

    async def _play(self, requests: Sequence[RecordedRequest]) -> Figures:
        replicas = [
            ModelReplica(slot, self.machine, seed=self.seed) for slot in range(self.replicas)
        ]
        router = OurRouter(replicas, self.settings)
        client = _Client(router, self.machine.shape.block_tokens)
        records = await client.run(requests)
        await router.stop()
        return _figures(records[_warm(requests) :])


class _Client:
    """Sends requests, each when it is due."""

    def __init__(self, router: OurRouter, block_tokens: int) -> None:
        self._router = router
        self._block_tokens = block_tokens
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[RecordedRequest, asyncio.Task[Record]] = {}
        self._began: dict[RecordedRequest, asyncio.Future[float]] = {}

    async def run(self, requests: Sequence[RecordedRequest]) -> list[Record]:
        """Send all of them; return their records in the same order."""
        self._began = {each: self._loop.create_future() for each in requests}
        for each in requests:
            self._tasks[each] = self._loop.create_task(self._send(each))
        return list(await asyncio.gather(*self._tasks.values()))

    async def _send(self, request: RecordedRequest) -> Record:
        due_s = await self._due_s(request)
        await asyncio.sleep(max(0.0, due_s - self._loop.time()))
        sent_s = self._loop.time()
        self._began[request].set_result(sent_s)
        output_tokens = request.output_tokens or 1
        record = Record(
            number=request.number,
            session=request.hashes.session,
            turn=0,
            prompt_tokens=request.prompt_tokens,
            due_s=due_s,
            sent_s=sent_s,
            streamed=request.streamed,
            output_tokens=output_tokens,
        )
        await self._router.answer(
            Sent(
                prompt=model_prompt(request, self._block_tokens),
                session=request.hashes.session,
                streamed=request.streamed,
                output_tokens=output_tokens,
                record=record,
            )
        )
        return record

    async def _due_s(self, request: RecordedRequest) -> float:
        before = request.before
        if before is None:
            return request.start_s
        began_s = await self._began[before]
        if request.start_s < before.end_s:
            return began_s + request.start_s - before.start_s
        await self._tasks[before]
        return self._loop.time() + request.start_s - before.end_s


def _figures(records: Sequence[Record]) -> Figures:
    answered = [each for each in records if each.ok]
    streamed = [each for each in answered if each.streamed]
    cached = sum(sum(each.cached_tokens.values()) for each in answered)
    return Figures(
        requests=len(records),
        answered=len(answered),
        ttft=_quantiles([each.ttft_s for each in streamed]),
        tpot=_quantiles([each.per_token_s for each in streamed]),
        hit_share=_share(cached, sum(each.prompt_tokens for each in answered)),
    )


def _warm(requests: Sequence[RecordedRequest]) -> int:
    return int(_WARM_SHARE * len(requests))


def _quantiles(values: Sequence[float | None]) -> Quantiles | None:
    known = [each for each in values if each is not None]
    return Quantiles.of(known) if known else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
