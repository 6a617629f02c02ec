"""A modelled replica: its scheduler with the engine's own decisions, and its faults."""

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, Protocol

from cacheengine.record import KeyEventRecord
from replay.engine import ModelEngine
from replay.estimates import Foresight
from replay.requests import ModelPrompt
from router.index.prompt_keys import KvTier, keys64
from simulator.engine_tiers import EngineTiers
from simulator.model.lower_tier_view import LowerTiers
from simulator.model.model_events import GpuBlocksCleared, GpuBlocksRemoved, GpuBlocksStored
from simulator.model.replica_machine import Machine
from simulator.model.replica_model import ReplicaMeter, ReplicaModel
from simulator.model.sim_request import SimRequest

_FIRST_AND_LAST: Final = 10**9
"""So many tokens between two notices: the caller is notified of the first and the last only."""
_LOOK_AGAIN_S: Final = 0.02
"""Between lookups of a request that waits for a lower tier and that no event will wake."""
_TIERS: Final = {each.value: each for each in KvTier}


class ReplicaDownError(Exception):
    """Nobody listens there."""


class AnswerCutError(Exception):
    """The replica has died before an answer's end."""


class Listener(Protocol):
    """A router, as a replica's events reach it."""

    def stored(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        """Hear that a tier holds blocks now (of a lower tier: chunks, by their last block)."""

    def removed(self, replica: int, tier: KvTier, keys: Sequence[int]) -> None:
        """Hear that a tier does not hold blocks any more."""

    def cleared(self, replica: int) -> None:
        """Hear that a GPU's cache was emptied."""


@dataclass(eq=False, slots=True)
class Serving:
    """A request at a replica."""

    request: SimRequest
    on_first_token: Callable[[float], None]
    done: "asyncio.Future[None]"
    """Ends with the answer, or with `AnswerCutError`."""
    has_begun: bool = field(default=False)


class ModelReplica:
    """Serves `submit`, on the present event loop.

    ``noise`` is the standard deviation of the logarithm of a step's duration;
    ``shared`` tiers take the place of its own, and it keeps a `Foresight`.
    """

    def __init__(
        self,
        slot: int,
        machine: Machine,
        *,
        seed: int = 0,
        noise: float = 0.0,
        shared: LowerTiers | None = None,
    ) -> None:
        self.slot = slot
        self.machine = machine
        self.is_alive = True
        self.listeners: list[Listener] = []
        self.engine = ModelEngine(machine, self._tiers_changed)
        self._loop = asyncio.get_running_loop()
        self._tiers = EngineTiers(
            self.engine,
            chunk_tokens=machine.shape.chunk_tokens,
            is_shared=False,
            clock=self._loop.time,
            prefill_tokens_per_s=machine.rates.prefill_tokens_per_s,
            on_promoted=self._wake,
        )
        lower_tiers: LowerTiers = self._tiers if shared is None else shared
        chooser = random.Random(f"{seed} {slot}")
        self.model = ReplicaModel(
            machine.shape,
            machine.rates,
            lower_tiers,
            noise=lambda: chooser.lognormvariate(0.0, noise) if noise else 1.0,
            meter=ReplicaMeter(self.engine.steps, self.engine.loads),
        )
        self.foresight = None if shared is None else Foresight(self.model, shared)
        self._serving: dict[SimRequest, Serving] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = count(1)
        self._loans: dict[SimRequest, tuple[ModelReplica, SimRequest]] = {}
        """By a request that pulls, who lends it which request's blocks."""

    def submit(
        self,
        prompt: ModelPrompt,
        output_tokens: int,
        on_first_token: Callable[[float], None],
        *,
        lends: bool = False,
        pulls_from: "tuple[ModelReplica, SimRequest] | None" = None,
    ) -> Serving:
        """Queue a request. A request that ``lends`` keeps its blocks for one that pulls its KV.

        Raises `ReplicaDownError`, and ValueError if it can never fit."""
        if not self.is_alive:
            raise ReplicaDownError
        step = self.machine.shape.blocks_per_chunk
        request = SimRequest(
            id=str(next(self._numbers)),
            prompt_tokens=prompt.token_count,
            output_tokens=output_tokens,
            block_keys=prompt.keys,
            chunk_keys=prompt.keys[step - 1 :: step],
            emit_every=_FIRST_AND_LAST,
            lends=lends,
            pull_tokens=0 if pulls_from is None else prompt.token_count,
        )
        if pulls_from is not None:
            self._loans[request] = pulls_from
        if self.foresight is not None:
            self.model.advance(self._loop.time())
            self.foresight.expect(request)
        try:
            self.model.arrive(request, self._loop.time())
        except ValueError:
            self._forget(request)
            raise
        serving = Serving(request, on_first_token, self._loop.create_future())
        self._serving[request] = serving
        self._settle()
        return serving

    def die(self) -> None:
        """Cut all answers and forget the GPU and CPU RAM; the disk keeps what it has."""
        self.model.advance(self._loop.time())
        self._settle()  # what has ended by now was heard
        self.is_alive = False
        for serving in list(self._serving.values()):
            self.model.cancel(serving.request, self._loop.time())
            self._forget(serving.request)
            serving.done.set_exception(AnswerCutError())
        self._serving.clear()
        for request in list(self.model.lent):
            self.model.end_loan(request, self._loop.time())
        self.model.clear_gpu()
        self._settle()
        self.engine.clear_cpu()

    def come_back(self) -> None:
        """Serve again, with an empty GPU."""
        self.is_alive = True

    def _wake(self) -> None:
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self.model.is_blocked:
            self.model.poke(self._loop.time())
        else:
            self.model.advance(self._loop.time())
        self._settle()

    def _settle(self) -> None:
        """Tell what has happened, and come back when more will have."""
        for event in self.model.take_events():
            match event:
                case GpuBlocksStored(request, first, end):
                    keys = _numbers(request.block_keys[first:end])
                    for each in self.listeners:
                        each.stored(self.slot, KvTier.GPU, keys)
                case GpuBlocksRemoved(gone):
                    keys = _numbers(gone)
                    for each in self.listeners:
                        each.removed(self.slot, KvTier.GPU, keys)
                case GpuBlocksCleared():
                    for each in self.listeners:
                        each.cleared(self.slot)
        for request, _ in self.model.take_pulled():
            self._end_loan(request)
        for request, _, at_s in self.model.take_progress():
            self._hear(self._serving[request], at_s)
        self._set_timer()

    def _hear(self, serving: Serving, at_s: float) -> None:
        if not serving.has_begun:
            serving.has_begun = True
            serving.on_first_token(at_s)
        if serving.request.finished_s is not None:
            del self._serving[serving.request]
            self._forget(serving.request)
            serving.done.set_result(None)

    def _end_loan(self, request: SimRequest) -> None:
        if (loan := self._loans.pop(request, None)) is not None:
            lender, lent = loan
            self._loop.call_soon(lender.end_loan, lent)

    def end_loan(self, request: SimRequest) -> None:
        """Free the blocks that a request has lent."""
        if self.model.end_loan(request, self._loop.time()):
            self._settle()

    def _forget(self, request: SimRequest) -> None:
        self._end_loan(request)
        if self.foresight is not None:
            self.foresight.forget(request)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.model.next_s()
        if self.model.is_blocked:
            again_s = self._loop.time() + _LOOK_AGAIN_S
            next_s = again_s if next_s is None else min(next_s, again_s)
        if next_s is not None:
            self._timer = self._loop.call_at(next_s, self._look)

    def _tiers_changed(self, records: Sequence[KeyEventRecord]) -> None:
        for record in records:
            keys = keys64([*record.keys])
            for each in self.listeners:
                tell = each.stored if record.stored else each.removed
                tell(self.slot, _TIERS[record.tier], keys)


def _numbers(keys: Sequence[bytes]) -> list[int]:
    return keys64(keys) if keys else []


def numbers_of(prompt: ModelPrompt) -> "array[int]":
    """Return the keys of a prompt's full blocks as numbers."""
    return array("Q", _numbers(prompt.keys[: prompt.prompt_blocks]))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One replica's."""

    slot: int
    slowdown: float = 1.0
    """Factor by which it computes more slowly, from the start on."""
    dies_s: float | None = None
    returns_s: float | None = None


def machine_of(machine: Machine, slot: int, faults: Sequence[Fault]) -> Machine:
    """Return what a replica runs on, its slowness included."""
    for each in faults:
        if each.slot == slot and each.slowdown != 1.0:
            machine = replace(machine, rates=machine.rates.slowed(each.slowdown))
    return machine


async def run_faults(replicas: Sequence[ModelReplica], faults: Sequence[Fault]) -> None:
    """Let replicas die and return at their times."""
    loop = asyncio.get_running_loop()
    for each in faults:
        replica = replicas[each.slot]
        if each.dies_s is not None:
            loop.call_at(each.dies_s, replica.die)
        if each.returns_s is not None:
            loop.call_at(each.returns_s, replica.come_back)
