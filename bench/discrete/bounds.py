"""A fleet with real queues and perfect caching: one infinite cache that all replicas share.

Its router knows every replica's true state. It holds requests, shortest first, and places each
by the replicas' own models when a replica will soon be done with what it has. It decides
greedily, one request after the other, so another router can be a little better.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from replay.estimates import Estimate, Foresight, estimate
from replay.replica import AnswerCutError, ModelReplica, ReplicaDownError
from replay.requests import Sent
from simulator.model.lower_tier_view import LoadableTokens
from simulator.model.sim_request import SimRequest

_AHEAD_S: Final = 0.25
"""Work that may lie before a request when it is sent: so that no replica idles."""
_AGEING: Final = 0.25
"""Seconds of service that a second of waiting makes up for in the order."""
_BUSY_WEIGHT: Final = 0.5
"""Weight of a replica's time compared with the request's own."""
_LOOKS: Final = 8
"""How many waiting requests are placed again at a time, shortest first."""
_AGAIN_S: Final = 0.1


class SharedCache:
    """One infinite cache of all replicas (`LowerTiers`): what any has computed, all have."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._held: set[bytes] = set()

    def find(
        self, request: SimRequest, gpu_tokens: int, *, others: int = 0
    ) -> LoadableTokens | None:
        """Return all that was ever computed of a request's prompt."""
        first = gpu_tokens // self._chunk_tokens
        end = first + len(self.tiers_of(request.chunk_keys[first : self._chunks(request)]))
        tokens = end * self._chunk_tokens - gpu_tokens
        return LoadableTokens(cpu=tokens) if tokens >= self._chunk_tokens else LoadableTokens()

    def begin_load(self, request: SimRequest) -> None:
        """Nothing is held: nothing is ever evicted."""

    def end_load(self, request: SimRequest) -> None:
        """Nothing is held."""

    def begin_store(self, request: SimRequest) -> Sequence[bytes]:
        """Keep what was computed, at once."""
        end = request.computed // self._chunk_tokens
        self._held.update(request.chunk_keys[request.stored_chunks : end])
        request.stored_chunks = end
        return ()

    def end_store(self, chunks: Sequence[bytes]) -> None:
        """Never called: stores end as they begin."""

    def end_schedule(self) -> None:
        """Nothing to end."""

    def forget(self, request: SimRequest) -> None:
        """Nothing to forget."""

    def tiers_of(self, chunk_keys: Sequence[bytes]) -> Sequence[str]:
        """Return "cpu" for each leading chunk that any replica has computed."""
        held = 0
        for key in chunk_keys:
            if key not in self._held:
                break
            held += 1
        return ["cpu"] * held

    def _chunks(self, request: SimRequest) -> int:
        return request.prefill_end // self._chunk_tokens


@dataclass(eq=False, slots=True)
class _Waiting:
    sent: Sent
    asked: SimRequest
    arrived_s: float
    released: "asyncio.Future[int]"
    busy_s: float = 0.0

    def order(self, now_s: float) -> float:
        """Return what is lowest for the request to go first."""
        return self.busy_s - _AGEING * (now_s - self.arrived_s)


class ForesightRouter:
    """A router that asks the models of replicas with a shared cache (`ModelReplica.foresight`)."""

    def __init__(self, replicas: Sequence[ModelReplica]) -> None:
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        self._pumping = self._loop.create_task(self._pump_often())

    async def answer(self, sent: Sent) -> None:
        """Hold a request until its best replica can soon begin; send it there.

        A request whose replica dies before the answer begins is held again.
        """
        while not await self._try(sent):
            pass

    async def _try(self, sent: Sent) -> bool:
        waiting = self._note(sent)
        self._pump()
        slot = await waiting.released
        replica = self._replicas[slot]
        began = False

        def first_token(now_s: float) -> None:
            nonlocal began
            began = True
            sent.began(now_s)

        try:
            serving = replica.submit(sent.prompt, sent.output_tokens, first_token)
            await serving.done
            sent.served(slot, serving.request, self._loop.time())
        except ReplicaDownError:
            return False
        except AnswerCutError:
            if not began or not sent.streamed:
                return False
            sent.failed(200, "the answer broke off", self._loop.time())
        except ValueError as error:
            sent.failed(400, str(error), self._loop.time())
        self._pump()
        return True

    def _note(self, sent: Sent) -> _Waiting:
        step = self._replicas[0].machine.shape.blocks_per_chunk
        asked = SimRequest(
            id="",
            prompt_tokens=sent.prompt.token_count,
            output_tokens=sent.output_tokens,
            block_keys=sent.prompt.keys,
            chunk_keys=sent.prompt.keys[step - 1 :: step],
        )
        waiting = _Waiting(sent, asked, self._loop.time(), self._loop.create_future())
        if (found := self._best(waiting)) is not None:
            waiting.busy_s = found[1].busy_s
        self._waiting.append(waiting)
        return waiting

    def _best(self, waiting: _Waiting) -> tuple[ModelReplica, Estimate] | None:
        """Return the replica that is best for a request; None while all are dead."""
        now_s = self._loop.time()
        estimates = [
            (each, estimate(_foresight(each), waiting.asked, now_s))
            for each in self._replicas
            if each.is_alive
        ]
        return min(
            estimates,
            key=lambda one: one[1].ttft_s + _BUSY_WEIGHT * one[1].busy_s,
            default=None,
        )

    def _pump(self) -> None:
        """Send those whose best replica has little before them."""
        now_s = self._loop.time()
        self._waiting.sort(key=lambda each: each.order(now_s))
        for waiting in list(islice(self._waiting, _LOOKS)):
            if (found := self._best(waiting)) is None:
                return
            replica, best = found
            waiting.busy_s = best.busy_s
            if best.queue_s <= _AHEAD_S:
                self._waiting.remove(waiting)
                waiting.released.set_result(replica.slot)
                # One at a time: the next is placed when this one is at its replica.
                self._loop.call_soon(self._pump)
                return

    async def _pump_often(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self._waiting:
                self._pump()

    def counts(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    async def stop(self) -> None:
        """End what runs in the background."""
        self._pumping.cancel()
        with suppress(asyncio.CancelledError):
            await self._pumping


def _foresight(replica: ModelReplica) -> Foresight:
    assert replica.foresight is not None, "only replicas with a shared cache have a foresight"
    return replica.foresight
